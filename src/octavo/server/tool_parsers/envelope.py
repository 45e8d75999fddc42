r"""CallEnvelope: reads `{"name": "f", "arguments": {...}}` as it comes, and passes the arguments on while they grow.

    {"name": "f", "arguments": {"city": "Pa|ris", "n": 3}}
    `--- held -----------------'`-- goes out -----------'`- dropped

Nothing goes out before the name is known and the arguments have turned out to be an object. Until then a text may still
be something else (`is_broken`), and the caller has all of it in `unspent`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Any

from octavo.server.tool_parsers.deltas import ArgumentsDelta, ToolCallStart, ToolDelta

_WHITE_SPACE = " \t\r\n"


class _At(Enum):
    """What may come next."""

    OBJECT = "{"
    FIRST_KEY = "a key or }"
    KEY = "a key"
    IN_KEY = "the rest of a key"
    COLON = ":"
    VALUE = "a value"
    IN_VALUE = "the rest of a value"
    COMMA = ", or }"
    END = "nothing"


class CallEnvelope:
    """One call.

    Args:
        index: Number of the call in its answer.
        is_known: Tells whether a function of that name exists; another name is no call.
        argument_keys: Keys under which arguments may stand.
        needs_arguments: Without arguments it is no call; otherwise that is a call without any.
    """

    def __init__(
        self, index: int, *, is_known: Callable[[str], bool], argument_keys: tuple[str, ...], needs_arguments: bool
    ) -> None:
        self._index = index
        self._is_known = is_known
        self._argument_keys = argument_keys
        self._needs_arguments = needs_arguments
        self._at = _At.OBJECT
        self._read: list[str] = []
        self._num_spent = 0
        self._key = ""
        self._value_start = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._name: str | None = None
        self._arguments: str | None = None
        self.has_started = False
        self.is_broken = False

    @property
    def is_closed(self) -> bool:
        return self._at is _At.END

    @property
    def unspent(self) -> str:
        """What was read and has not gone out, nor belongs to a call that has."""
        return "".join(self._read[self._num_spent :])

    @property
    def is_valid(self) -> bool:
        """Whether the whole envelope, and so its arguments, are valid JSON."""
        return self.is_closed and _loads("".join(self._read)) is not _INVALID

    def push(self, text: str) -> tuple[int, list[ToolDelta]]:
        """Read on, up to the end of the object or the first character that cannot belong to it.

        Returns:
            Characters read, and what has become certain.
        """
        deltas: list[ToolDelta] = []
        num_read_before = len(self._read)
        for character in text:
            if self.is_closed or not self._takes(character, deltas):
                break
        if self.has_started and self._at is _At.IN_VALUE and self._key in self._argument_keys:
            self._pass_on(deltas)
        return len(self._read) - num_read_before, deltas

    # ---- one character ----

    def _takes(self, character: str, deltas: list[ToolDelta]) -> bool:
        if self._at is _At.IN_VALUE and self._ends_scalar(character):
            self._end_value(deltas)
            if self.is_broken:
                return False
        if self._at in (_At.IN_KEY, _At.IN_VALUE):
            self._read.append(character)
            self._read_on(character)
            if self._depth == 0 and not self._is_in_string and not self._is_scalar():
                self._end_key_or_value(deltas)
            # The character that shows what is wrong has been read: it is in `unspent`.
            return not self.is_broken
        if character in _WHITE_SPACE:
            self._read.append(character)
            return True
        if not self._steps(character, deltas):
            self.is_broken = True
            return False
        self._read.append(character)
        if self._at is _At.END:
            self._close(deltas)
        return not self.is_broken

    def _steps(self, character: str, deltas: list[ToolDelta]) -> bool:
        """Move on by a character of the object itself; `False` if it cannot stand here."""
        at = self._at
        if at is _At.OBJECT and character == "{":
            self._at = _At.FIRST_KEY
        elif at in (_At.FIRST_KEY, _At.KEY) and character == '"':
            self._begin(_At.IN_KEY)
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at is _At.VALUE and character in '"{[-0123456789tfn':
            self._begin(_At.IN_VALUE)
            self._read_on(character)
            if character == "{" and self._key in self._argument_keys and self._name is not None:
                self._start(deltas)
        elif at is _At.COMMA and character == ",":
            self._at = _At.KEY
        elif at in (_At.COMMA, _At.FIRST_KEY) and character == "}":
            self._at = _At.END
        else:
            return False
        return True

    def _begin(self, at: _At) -> None:
        self._at = at
        self._value_start = len(self._read)
        self._depth = 0
        self._is_in_string = at is _At.IN_KEY
        self._is_escaped = False

    def _read_on(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _is_scalar(self) -> bool:
        return self._at is _At.IN_VALUE and self._read[self._value_start] not in '"{['

    def _ends_scalar(self, character: str) -> bool:
        return self._is_scalar() and (character in ",}" or character in _WHITE_SPACE)

    # ---- keys and values ----

    def _end_key_or_value(self, deltas: list[ToolDelta]) -> None:
        if self._at is _At.IN_VALUE:
            self._end_value(deltas)
            return
        key = _loads("".join(self._read[self._value_start :]))
        self._at = _At.COLON
        self._key = key if isinstance(key, str) else ""
        is_twice = (self._key == "name" and self._name is not None) or (
            self._key in self._argument_keys and self._arguments is not None
        )
        self.is_broken = key is _INVALID or is_twice

    def _end_value(self, deltas: list[ToolDelta]) -> None:
        self._at = _At.COMMA
        text = "".join(self._read[self._value_start :])
        if self._key == "name":
            name = _loads(text)
            if not isinstance(name, str) or not self._is_known(name):
                self.is_broken = True
                return
            self._name = name
        elif self._key in self._argument_keys:
            if self.has_started:
                self._arguments = text
                self._pass_on(deltas)
                return
            self._arguments = _as_object(text)
            if self._arguments is None:
                self.is_broken = True
                return
        if self._name is not None and self._arguments is not None and not self.has_started:
            self._start(deltas)
            deltas.append(ArgumentsDelta(self._index, self._arguments))

    def _pass_on(self, deltas: list[ToolDelta]) -> None:
        """Let what has been read of the arguments go out."""
        piece = "".join(self._read[self._num_spent :])
        if piece:
            deltas.append(ArgumentsDelta(self._index, piece))
        self._num_spent = len(self._read)

    def _start(self, deltas: list[ToolDelta]) -> None:
        assert self._name is not None
        self.has_started = True
        self._num_spent = len(self._read)
        deltas.append(ToolCallStart(self._index, self._name))

    def _close(self, deltas: list[ToolDelta]) -> None:
        if self.has_started:
            self._num_spent = len(self._read)
        elif self._name is None or self._needs_arguments:
            self.is_broken = True
        else:
            self._start(deltas)
            deltas.append(ArgumentsDelta(self._index, "{}"))


_INVALID = object()


def _loads(text: str) -> Any:
    """Return the value of a JSON text; `_INVALID` if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _INVALID


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _as_object(text: str) -> str | None:
    """Return arguments as the JSON of an object: as they are, out of a text that holds them, or none for null."""
    value = _loads(text)
    if value is None:
        return "{}"
    if isinstance(value, str):
        text, value = value, _loads(value)
    return text if isinstance(value, dict) else None
