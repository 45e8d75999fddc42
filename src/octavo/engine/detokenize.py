"""Detokenizer: turns the tokens of one answer into text as they come.

    push(id)                      finish()
      │ bytes of the token          │
      ▼                             ▼
    whole UTF-8 characters  ───▶  leading space  ───▶  stop strings  ───▶  text that will not be taken back
    (the start of one waits)      (SentencePiece)      (their beginnings wait)

What comes out, joined, is `decode` of all ids with the same flags, cut at the first stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.engine.stop_strings import Released, StopMatcher, prepare_stops


class TokenSpeller(Protocol):
    """What detokenising needs to know of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool:
        """True if the encoder puts a space before a text, so that decoding takes one from its start."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text; empty for an id without a token."""

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token is left out of the text when special tokens are skipped."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of an answer, and the stop string that ended it, if one did."""

    text: str
    stopped_by: str | None = None


class Detokenizer:
    """The text of one answer, growing by whole characters.

    Bytes that are not UTF-8 become U+FFFD, each only once it is certain that no later token completes them. Children of
    one prompt (`n` > 1) have one each.

    Args:
        tokenizer: Spells tokens.
        stop: Strings that end the text.
        include_stop: Leave the stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        prompt_token_ids: What the answer follows. SentencePiece's space is taken from the start of a *text*: if the
            prompt has any, the answer's first space separates the two and stays. Read up to its first text only.

    Mutates: itself, in `push` and `finish`. After a stop or `finish` nothing may be pushed any more.
    """

    __slots__ = ("_is_over", "_matcher", "_parts", "_pending", "_skips_special", "_strips_space", "_tokenizer")

    def __init__(
        self,
        tokenizer: TokenSpeller,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_token_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._matcher = StopMatcher(prepare_stops(stop), include_stop=include_stop) if stop else None
        self._pending = b""
        self._parts: list[str] = []
        self._is_over = False
        self._strips_space = tokenizer.strips_leading_space
        if self._strips_space:
            self._strips_space = not any(map(self._visible, prompt_token_ids))

    @property
    def text(self) -> str:
        """All text so far, without what is still held back."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token would add to the text if pushed next, for log-probabilities.

        Those of the pushed tokens, joined, are the UTF-8 form of the text, unless a stop string cuts it.

        Raises:
            InvalidParameterError: an id outside the vocabulary.
        """
        data = self._visible(token_id)
        return data.removeprefix(b" ") if self._strips_space else data

    def push(self, token_id: int, *, may_stop: bool = True) -> TextDelta:
        """Take the next token; return the text that it makes certain.

        Args:
            may_stop: Off ignores a stop string that this token completes (before `min_tokens`).

        Cost: O(bytes of the token).

        Raises:
            InvalidParameterError: an id outside the vocabulary.
        """
        assert not self._is_over, "a token was pushed after the end of the text"
        data = self._visible(token_id)
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        data = self._pending + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        if self._matcher is None:
            return self._release(Released(text))
        return self._release(self._matcher.feed(text, may_stop=may_stop))

    def finish(self) -> TextDelta:
        """Return what was held back, at the end of the answer: no later token can change it. Empty after a stop.

        A stop string is reported here if it was complete, but one that starts earlier could still have completed.
        """
        if self._is_over:
            return TextDelta("")
        text = self._pending.decode("utf-8", errors="replace")
        self._pending = b""
        if self._matcher is None:
            released = Released(text)
        else:
            released = self._matcher.feed(text)
            if released.stopped_by is None:
                rest = self._matcher.finish()
                released = Released(released.text + rest.text, rest.stopped_by)
        delta = self._release(released)
        self._is_over = True
        return delta

    def _visible(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        return b"" if self._skips_special and self._tokenizer.is_special(token_id) else data

    def _release(self, released: Released) -> TextDelta:
        if released.text:
            self._parts.append(released.text)
        self._is_over = released.stopped_by is not None
        return TextDelta(released.text, released.stopped_by)
