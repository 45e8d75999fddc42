"""TemplateSandbox: runs the chat template of a downloaded model as the untrusted program that it is.

Jinja's sandbox keeps a template from reaching Python. This one also keeps it from running for ever or filling memory:

    steps      loop rounds, calls, filters and operators of one rendering are counted, and a clock is looked at
    sizes      every text or list that an operator, call or filter makes is bounded, see `template_limits.py`
    output     the rendered text is bounded

Filters that lay out web pages are left out. What a template may do is otherwise what transformers allows it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.runtime.template_limits import (
    TemplateLimitError,
    check_filter,
    check_operator,
    check_size,
    check_text_call,
    checked,
    text_size,
)

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0

_UNWANTED_FILTERS = ("filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_UNWANTED_GLOBALS = ("lipsum",)


class _Steps:
    """What one rendering has left."""

    __slots__ = ("_deadline_s", "_left")

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._deadline_s = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TemplateLimitError(f"it runs for more than {MAX_STEPS:,} steps")
        if self._left % 64 == 0 and time.monotonic() > self._deadline_s:
            raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} seconds")


# Rendering happens in many threads with one compiled template; Jinja hands filters nothing that belongs to one of them.
_steps: ContextVar[_Steps | None] = ContextVar("template_steps", default=None)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled and rendered in, with the settings transformers uses."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=_printable,
        )
        self.filters["tojson"] = _tojson
        for name in _UNWANTED_FILTERS:
            del self.filters[name]
        for name in _UNWANTED_GLOBALS:
            del self.globals[name]
        self.filters = {name: _guarded(name, filter_) for name, filter_ in self.filters.items()}
        self.filters |= {"_rounds": _Rounds, "_concat": _concat}
        self.globals["dict"] = _make_dict

    def render_bounded(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this environment.

        Raises:
            TemplateLimitError: too many steps, too long a text.
            jinja2.TemplateError: the template asked for it, or is wrong.
        """
        token = _steps.set(_Steps())
        try:
            parts: list[str] = []
            num_characters = 0
            for part in template.generate(variables):
                num_characters += len(part)
                check_size(num_characters)
                parts.append(part)
            return "".join(parts)
        finally:
            _steps.reset(token)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_CountRounds().visit(source), *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _spend()
        check_operator(operator, left, right)
        return checked(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _spend()
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check_text_call(method.__name__, owner, [*args, *kwargs.values()])
        return checked(super().call(context, function, *args, **kwargs))


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a model wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare them

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _CountRounds(NodeTransformer):
    """Rewrites a template so that its loops count their rounds, and `~` is bounded like any filter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named after Jinja's node
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_rounds", [], [], None, None).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes).set_lineno(node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None).set_lineno(node.lineno)


class _Rounds:
    """What a loop goes over, counting; with a length if that has one, for `loop.length` and `loop.last`."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _spend()
            yield item

    def __len__(self) -> int:
        if isinstance(self._items, Sized):
            return len(self._items)
        raise TypeError("unknown length")


def _spend() -> None:
    steps = _steps.get()
    if steps is not None:  # None while Jinja works out constants at compile time
        steps.spend()


def _guarded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts as a step and makes nothing too large."""
    num_passed = 1 if hasattr(filter_, "jinja_pass_arg") else 0  # Jinja's own argument comes before the value

    @wraps(filter_)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _spend()
        check_filter(name, args[num_passed], [*args[num_passed + 1 :], *kwargs.values()])
        return checked(filter_(*args, **kwargs))

    return guarded


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dict; the class itself would lend templates its methods."""
    return dict(*args, **kwargs)


def _concat(parts: list[Any]) -> str:
    """Join values as text: the operator `~`."""
    _spend()
    check_size(text_size(parts))
    return "".join(map(str, parts))


def _printable(value: Any) -> Any:
    """Return a value that is about to be written out, unless its text would be too long."""
    if not isinstance(value, str):
        text_size(value)
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON as models were trained on it: Jinja's own filter would escape `<` and `'` for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
