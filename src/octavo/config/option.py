"""What a config field tells about itself: help, unit, range, spellings, and how to read its value.

One description feeds the command line, the environment, the Python keywords, the docs and the checks, so that a name
means the same everywhere. Values are read here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import InvalidParameterError
from octavo.units import MAX_BYTES, format_bytes, parse_bytes, parse_count, quote

OptionKind = Literal["text", "list", "numbers", "count", "integer", "bytes", "ratio", "seconds", "flag", "choice"]
ENV_PREFIX = "OCTAVO_"
MAX_SECONDS = 7 * 24 * 3600
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row of the option table.

    Args:
        name: Field name; the flag is `--name-with-dashes`, the environment variable `OCTAVO_NAME`.
        kind: How a value is read and checked. `count` is a whole number of at least 1 (`4k` = 4096), `bytes` needs a
            unit, `ratio` lies above 0 and at most at 1, `seconds` are at least 0, a `list` is a
            tuple of texts (separated by commas where one text has to hold all), `numbers` a tuple of whole numbers.
        help: One sentence for a person, without the default.
        group: Heading under which help lists it.
        unit: Unit of the value, for help and docs; empty where the kind says it all.
        choices: Allowed words of a `choice`.
        choice_aliases: Other spellings of a choice, as other engines write it.
        refused: Words that are understood but not built, each with what to do instead.
        flag: Name of the flag where it differs from the field, without dashes in front.
        aliases: Hidden spellings of other engines, as field names.
        minimum, maximum: Inclusive range of a `count` or `integer`.
        auto: What an unset value means, in words; empty when the default is a plain value.
        is_positional: The command line takes it as an argument, not as an option.
    """

    name: str
    kind: OptionKind
    help: str
    group: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    choice_aliases: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    flag: str = ""
    aliases: tuple[str, ...] = ()
    minimum: int = 1
    maximum: int = 2**31 - 1
    auto: str = ""
    is_positional: bool = False
    default: Any = None

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag_name(self) -> str:
        return (self.flag or self.name).replace("_", "-")

    def read(self, value: object, *, param: str) -> Any:
        """Turn a value as a person gave it (text, or a Python value) into the field's type.

        Args:
            value: Text from the command line, environment or a file, or a Python value from a keyword.
            param: The spelling the person used; errors name it.

        Raises:
            InvalidParameterError: the value is not allowed, with what is.
        """
        match self.kind:
            case "text":
                return self._read_text(value, param)
            case "list":
                return self._read_list(value, param)
            case "numbers":
                return self._read_numbers(value, param)
            case "seconds":
                return self._read_seconds(value, param)
            case "flag":
                return self._read_flag(value, param)
            case "choice":
                return self._read_choice(value, param)
            case "ratio":
                return self._read_ratio(value, param)
            case "bytes":
                return self._read_bytes(value, param)
            case "count" | "integer":
                return self._read_int(value, param)

    def show(self, value: object) -> str:
        """Print a value as a person would write it back."""
        if value is None:
            return "auto"
        if isinstance(value, bool):
            return "on" if value else "off"
        if self.kind == "bytes" and isinstance(value, int):
            return format_bytes(value)
        if isinstance(value, tuple):
            return ", ".join(map(str, value)) or "none"
        return f"{value:g} s" if self.kind == "seconds" else str(value)

    def _read_text(self, value: object, param: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise InvalidParameterError(f"{quote(value)} is not a non-empty text", param=param)
        return value

    def _read_list(self, value: object, param: str) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not all(isinstance(each, str) and each.strip() for each in given):
            raise InvalidParameterError("not a list of non-empty texts", param=param)
        return tuple(dict.fromkeys(each.strip() for each in given))

    def _read_numbers(self, value: object, param: str) -> tuple[int, ...]:
        given = [each.strip() for each in value.split(",") if value.strip()] if isinstance(value, str) else value
        if not isinstance(given, list | tuple):
            raise InvalidParameterError(
                f"{quote(value)} is not a list of whole numbers", param=param, hints=("write for example 0,1,29",)
            )
        return tuple(sorted({self._read_int(each, param) for each in given}))

    def _read_seconds(self, value: object, param: str) -> float:
        try:
            seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            seconds = math.nan
        if not 0.0 <= seconds <= MAX_SECONDS:
            raise InvalidParameterError(
                f"{quote(value)} is not a number of seconds from 0 to {MAX_SECONDS:,}", param=param
            )
        return seconds

    def _read_flag(self, value: object, param: str) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise InvalidParameterError(f"{quote(value)} is neither true nor false", param=param, hints=("write 1 or 0",))

    def _read_choice(self, value: object, param: str) -> str:
        word = str(value).strip().lower()
        word = self.choice_aliases.get(word, word)
        if word in self.refused:
            raise InvalidParameterError(
                f"{quote(value)} is not available yet",
                param=param,
                because=self.refused[word],
                hints=(f"allowed now: {', '.join(self.choices)}",),
            )
        if word not in self.choices:
            raise InvalidParameterError(
                f"{quote(value)} is not one of {', '.join(self.choices)}",
                param=param,
                hints=did_you_mean(word, self.choices),
            )
        return word

    def _read_ratio(self, value: object, param: str) -> float:
        try:
            ratio = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            ratio = math.nan
        if not 0.0 < ratio <= 1.0:
            raise InvalidParameterError(
                f"{quote(value)} is not a ratio above 0 and at most 1", param=param, hints=("write for example 0.9",)
            )
        return ratio

    def _read_bytes(self, value: object, param: str) -> int:
        # A spelling that ends in "bytes" carries the unit itself, and so does a Python number: `kv_cache_memory=2**30`.
        if isinstance(value, int) and not isinstance(value, bool):
            num_bytes = value
        else:
            text = str(value).strip()
            has_unit_in_name = param.replace("-", "_").lower().endswith("_bytes") and text.isdecimal()
            num_bytes = parse_bytes(f"{text}B" if has_unit_in_name else text, param=param)
        if num_bytes < 1:
            raise InvalidParameterError(f"{quote(value)} is less than one byte", param=param)
        if num_bytes > MAX_BYTES:
            raise InvalidParameterError(f"{quote(value)} is more bytes than any machine has", param=param)
        return num_bytes

    def _read_int(self, value: object, param: str) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str):
            example = min(4096, max(16, self.maximum // 256)) if self.unit == "tokens" else 8
            is_count = self.kind == "count"
            number = parse_count(value, param=param, example=example) if is_count else _int_or_none(value)
        if number is None or not self.minimum <= number <= self.maximum:
            raise InvalidParameterError(
                f"{quote(value)} is not a whole number from {self.minimum:,} to {self.maximum:,}", param=param
            )
        return number


def option(*, default: Any, **described: Any) -> Any:
    """Declare a config field with its row of the option table; arguments as in `Option`."""
    return dataclasses.field(default=default, metadata={"option": described})


def options_of(config_type: type) -> tuple[Option, ...]:
    """Return the option table of a config dataclass, in the order of its fields."""
    return tuple(
        Option(name=each.name, default=each.default, **each.metadata["option"])
        for each in dataclasses.fields(config_type)
    )


def did_you_mean(word: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return a hint with the closest known word, or nothing when none is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return (f"did you mean {close[0]!r}?",) if close else ()


def _int_or_none(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
