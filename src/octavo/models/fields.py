"""Fields: typed reading of a model's configuration, where every odd value becomes an error that names the field."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from octavo.errors import ModelFileError

MAX_WHOLE = 1 << 31
"""Sizes are below this. A larger one is a broken file, and would only become a strange failure later."""


class Fields:
    """A mapping of field names to values, read with the type and range each must have.

    `null` counts as absent. Without a default an absent field is an error.

    Args:
        values: Field names to values.
        where: Start of the error messages: the file.
        parent: Prefix of the names in messages, for an object inside an object.
    """

    __slots__ = ("_parent", "_values", "where")

    def __init__(self, values: Mapping[str, object], where: str, *, parent: str = "") -> None:
        self._values = values
        self._parent = parent
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> object:
        """Return the value as it is, `None` where absent."""
        return self._values.get(name)

    def inner(self, name: str) -> Fields:
        """Return the fields of an object inside this one."""
        value = self.raw(name)
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {_brief(value)}, an object was expected")
        return Fields(value, self.where, parent=f"{self._parent}{name}.")

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """Return these fields with others where they are absent, as a family's own configuration class has them."""
        present = {name: value for name, value in self._values.items() if value is not None}
        return Fields({**self._values, **defaults, **present}, self.where, parent=self._parent)

    @property
    def values(self) -> Mapping[str, object]:
        """All of them, as they are."""
        return self._values

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def whole(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number of at least `minimum`."""
        value = self._present(name, default)
        if type(value) is not int or not minimum <= value < MAX_WHOLE:
            raise self.error(name, f"is {_brief(value)}, a whole number of at least {minimum} was expected")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.error(name, f"is {_brief(value)}, a finite number was expected")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self.error(name, f"is {value:g}, a number above 0 was expected")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_brief(value)}, true or false was expected")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._present(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"is {_brief(value)}, a string was expected")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty where absent."""
        value = self.raw(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise self.error(
                    name, f"names token {_brief(token)}", because=f"the vocabulary has ids 0 to {vocab_size - 1:,}"
                )
        return tuple(ids)

    def error(self, name: str, complaint: str, *, because: str = "") -> ModelFileError:
        """Return an error about a field, to be raised by the caller."""
        return ModelFileError(f"{self.where}: {self._parent}{name} {complaint}", because=because)

    def describe(self, name: str) -> str:
        """Return `file: field is value`, the start of a refusal."""
        return f"{self.where}: {self._parent}{name} is {_brief(self.raw(name))}"

    def _present(self, name: str, default: object) -> object:
        value = self.raw(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def shortest_float32(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32: 9.999999747378752e-06 becomes 1e-05.

    GGUF stores numbers in float32 that JSON spells in decimal; this makes both spellings the same number again.
    """
    if not math.isfinite(value):
        return value
    for digits in range(6, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _brief(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a huge number"  # printing it could take longer than reading the model
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
