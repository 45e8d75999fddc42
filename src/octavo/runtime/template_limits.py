"""How large the values of a chat template may be: what would be larger is worked out before it is made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 23
MAX_INTEGER_BITS = 1024

_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDE_FIELD = {"%": re.compile(r"%[^a-zA-Z%]*(?:\d{6}|\*)"), "{": re.compile(r"\{[^{}]*(?:\d{6}|:[^{}]*\{)")}
_OTHER_CHARACTERS = 64
"""What anything but a text counts as when written out; few enough rounds to measure a list that holds itself often."""
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, *_VIEWS)


class TemplateLimitError(SecurityError):
    """A template did, or would have done, more than any honest one needs."""


def check_size(num_characters: int) -> None:
    """Refuse a text or list of that length."""
    if num_characters > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a text or list longer than {MAX_CHARACTERS:,}")


def checked(value: Any) -> Any:
    """Return a new value, unless it is too large."""
    if isinstance(value, str | bytes | list | tuple | dict):
        check_size(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS:,} bits")
    return value


def text_size(value: Any) -> int:
    """Return about how long a value is as text, never counting far past the limit.

    A list may hold the same long text, or the same list, many times; only what it spells counts.
    """
    total, open_values = 0, [value]
    while open_values:
        value = open_values.pop()
        total += len(value) if isinstance(value, str) else _OTHER_CHARACTERS
        check_size(total)
        if isinstance(value, Namespace):
            raise TemplateLimitError("it writes out a namespace")
        if isinstance(value, dict):
            open_values += [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            open_values += value
    return total


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation that would make something huge."""
    if operator == "*":
        _check_product(left, right)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS:,} bits")
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,), sign="%")


def _check_product(left: Any, right: Any) -> None:
    for count, value in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            check_size(count * len(value))


def _check_format(text: str, values: Iterable[Any], *, sign: str) -> None:
    """Refuse wide fields, and many fields of long values."""
    if _WIDE_FIELD[sign].search(text.replace(sign * 2, "")):
        raise TemplateLimitError("it formats a text with a very wide field")
    check_size(len(text) + text.count(sign) * max(map(text_size, values), default=0))


def _check_join(separator: str, items: Any) -> None:
    is_measurable = isinstance(items, (dict, *_CONTAINERS))
    if is_measurable:  # anything else is made item by item, and bounded by what it is made of
        check_size(text_size(list(items)) + len(separator) * len(items))


def _check_replace(text: str, old: str, new: str) -> None:
    check_size(len(text) + text.count(old) * len(new))


def check_text_call(name: str, text: str, args: Sequence[Any]) -> None:
    """Refuse a method of a text that would make a huge one."""
    if name in _PADDING:
        for arg in args:
            if isinstance(arg, int):
                check_size(arg * (1 + text.count("\t")))
    elif name in ("format", "format_map"):
        _check_format(text, args, sign="{")
    elif name == "join" and args:
        _check_join(text, args[0])
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_replace(text, args[0], args[1])
    elif name == "translate":
        raise TemplateLimitError("it translates a text character by character")


def check_filter(name: str, value: Any, args: Sequence[Any]) -> None:
    """Refuse a filter that would make a huge text or list."""
    match name, args:
        case (("center" | "indent" | "tojson" | "batch" | "slice"), _):
            count = max((arg for arg in args if isinstance(arg, int)), default=1)
            check_size(text_size(value) * max(1, count))
        case "join", _:
            _check_join(str(args[0]) if args else "", value)
        case "replace", [str(old), str(new), *_] if isinstance(value, str):
            _check_replace(value, old, new)
        case "format", _ if isinstance(value, str):
            _check_format(value, args, sign="%")
        case "sum", [*_, (str() | list() | tuple())]:
            raise TemplateLimitError("it sums up lists")
        case "string", _:
            check_size(text_size(value))
