"""What a tool parser makes of a text: content, beginnings of calls, and pieces of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that is for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call has begun; `index` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments. Joined, they are the JSON of an object, as the model wrote it."""

    index: int
    text: str


ToolDelta = ContentDelta | ToolCallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnd:
    """What was still held back at the end of an answer, and why the answer ended.

    Args:
        finish_reason: "tool_calls" only where there were calls, all of them complete, their arguments valid JSON, and
            the model ended by itself; otherwise the engine's own reason.
    """

    deltas: Sequence[ToolDelta]
    finish_reason: str


class ToolParser(Protocol):
    """Reads one answer. However its text is cut into pieces, the deltas, joined, are the same."""

    def push(self, text: str) -> list[ToolDelta]:
        """Take more text; return what it makes certain."""

    def finish(self, reason: str) -> ToolEnd:
        """Take the end, and the engine's reason for it; nothing may be pushed any more."""
