"""CallParser: finds calls in the text of an answer, for formats that write a call as a JSON object.

    text ── open tag, or a bare { where one may stand ──> call ── its object closes ──> close tag ──> text
     ▲                                                     │ it turns out to be none                   │
     └─────────────── as content ──────────────────────────┴───────────────────────────────────────────┘

Text that may yet become a tag is held back, and so is white space: beside a call it only separates, and is dropped.
Everything else goes out, as content or as part of a call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from octavo.server.tool_parsers.deltas import ContentDelta, ToolCallStart, ToolDelta, ToolEnd
from octavo.server.tool_parsers.envelope import CallEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls.

    Args:
        open_tag: Stands before a call.
        close_tag: Stands behind it; empty if nothing does.
        separator: May stand between two calls, beside white space; empty if nothing may.
        takes_bare: A call needs no tag at the start of an answer, or behind another call.
        argument_keys: Keys of the arguments; the first is the one that is asked for.
        needs_arguments: An object without arguments is no call.
    """

    open_tag: str
    close_tag: str = ""
    separator: str = ""
    takes_bare: bool = False
    argument_keys: tuple[str, ...] = ("arguments",)
    needs_arguments: bool = False


class _In(Enum):
    TEXT = "text"
    CALL = "call"
    CLOSING = "closing"


class CallParser:
    """Implements `ToolParser` for one answer.

    Args:
        form: How calls are written.
        names: Functions that exist; an object that names another one is content. `None` takes any name.
    """

    def __init__(self, form: CallFormat, names: Collection[str] | None = None) -> None:
        self._form = form
        self._names = None if names is None else frozenset(names)
        self._in = _In.TEXT
        self._held = ""
        self._space = ""
        self._tag = ""
        self._envelope = self._new_envelope(0)
        self._num_calls = 0
        self._may_be_bare = form.takes_bare
        self._follows_call = False
        self._all_complete = True

    def push(self, text: str) -> list[ToolDelta]:
        self._held += text
        deltas: list[ToolDelta] = []
        steps = {_In.TEXT: self._read_text, _In.CALL: self._read_call, _In.CLOSING: self._read_closing}
        while steps[self._in](deltas):
            pass
        return _joined(deltas)

    def finish(self, reason: str) -> ToolEnd:
        deltas: list[ToolDelta] = []
        if self._in is _In.CALL:
            self._all_complete = False
            if not self._envelope.has_started:
                self._release(self._tag + self._envelope.unspent, deltas)
        elif self._in is _In.TEXT:
            self._release(self._held, deltas)
        if not self._follows_call and self._space:
            deltas.append(ContentDelta(self._space))
        is_done = reason == "stop" and self._num_calls > 0 and self._all_complete
        return ToolEnd(deltas=_joined(deltas), finish_reason="tool_calls" if is_done else reason)

    # Each step reads some of what is held and returns whether another may read on; otherwise more text is needed.

    def _read_text(self, deltas: list[ToolDelta]) -> bool:
        if self._may_be_bare:
            return self._read_before_bare(deltas)
        before, tag, behind = self._held.partition(self._form.open_tag)
        if tag:
            self._release(before, deltas)
            self._held = behind
            self._begin_call(tag)
            return True
        num_held = _num_begun(self._held, self._form.open_tag)
        self._release(self._held[: len(self._held) - num_held], deltas)
        self._held = self._held[len(self._held) - num_held :]
        return False

    def _read_before_bare(self, deltas: list[ToolDelta]) -> bool:
        """Look whether a call begins right here, where none needs a tag."""
        self._hold_space(self._form.separator if self._follows_call else "")
        if not self._held:
            return False
        if self._held[0] == "{":
            self._begin_call("")
            return True
        if len(self._held) < len(self._form.open_tag) and self._form.open_tag.startswith(self._held):
            return False
        self._may_be_bare = False
        return True

    def _read_call(self, deltas: list[ToolDelta]) -> bool:
        if not self._held:
            return False
        envelope = self._envelope
        num_read, new = envelope.push(self._held)
        self._held = self._held[num_read:]
        if new and isinstance(new[0], ToolCallStart):
            self._space = ""
            self._num_calls += 1
        deltas += new
        if envelope.is_broken:
            self._give_up_call(deltas)
            return True
        if not envelope.is_closed:
            return False
        self._all_complete &= envelope.is_valid
        self._end_call()
        return True

    def _read_closing(self, deltas: list[ToolDelta]) -> bool:
        self._hold_space()
        close_tag = self._form.close_tag
        if self._held.startswith(close_tag):
            self._held = self._held[len(close_tag) :]
            self._space = ""
        elif close_tag.startswith(self._held):
            return False
        self._in = _In.TEXT
        return True

    # ---- calls ----

    def _begin_call(self, tag: str) -> None:
        self._in = _In.CALL
        self._tag = tag
        self._envelope = self._new_envelope(self._num_calls)

    def _end_call(self) -> None:
        self._in = _In.CLOSING if self._form.close_tag else _In.TEXT
        self._follows_call = True
        self._may_be_bare = self._form.takes_bare

    def _give_up_call(self, deltas: list[ToolDelta]) -> None:
        """Let what looked like a call go out as content: all of it, or what follows arguments that are out already."""
        self._in = _In.TEXT
        self._may_be_bare = False
        if self._envelope.has_started:
            self._all_complete = False
            self._follows_call = True
            self._release(self._envelope.unspent, deltas)
        else:
            self._release(self._tag + self._envelope.unspent, deltas)

    def _new_envelope(self, index: int) -> CallEnvelope:
        return CallEnvelope(
            index,
            is_known=lambda name: bool(name) and (self._names is None or name in self._names),
            argument_keys=self._form.argument_keys,
            needs_arguments=self._form.needs_arguments,
        )

    # ---- content ----

    def _release(self, text: str, deltas: list[ToolDelta]) -> None:
        """Let text go out, but for the white space at its end."""
        kept = text.rstrip()
        if kept:
            deltas.append(ContentDelta(self._space + kept))
            self._space = ""
            self._follows_call = False
        self._space += text[len(kept) :]

    def _hold_space(self, separators: str = "") -> None:
        rest = self._held.lstrip()
        while separators and rest.startswith(separators):
            rest = rest[len(separators) :].lstrip()
        self._space += self._held[: len(self._held) - len(rest)]
        self._held = rest


def _num_begun(text: str, tag: str) -> int:
    """Return how many characters of `tag` the text ends with, at most all but one."""
    return next((length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length])), 0)


def _joined(deltas: list[ToolDelta]) -> list[ToolDelta]:
    """Put content together that one push gave in pieces."""
    joined: list[ToolDelta] = []
    for delta in deltas:
        if joined and isinstance(delta, ContentDelta) and isinstance(joined[-1], ContentDelta):
            joined[-1] = ContentDelta(joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined
