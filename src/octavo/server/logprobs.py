"""Log-probabilities as OpenAI's two endpoints write them, and the bytes that tokens really add to a text."""

from __future__ import annotations

import asyncio
import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from octavo.core.step import TokenLogprobs
from octavo.runtime.tokenizer import Tokenizer

MANY_SCORES = 500
"""A millisecond's work."""
T = TypeVar("T")
FLOOR = -9999.0
"""Written for minus infinity, which JSON has no word for. OpenAI and vLLM write the same number."""


class TokenSpelling:
    """The bytes that each token adds to one text, in order, and where in the text it begins.

    Args:
        skips_special: Special tokens add nothing.
        strips_space: The text is the first of its sequence, and the tokenizer takes a space from its start.
        offset: Characters before the text, for `text_offset`.
        written: What the text begins with as somebody wrote it: special tokens are seen where they stand in it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skips_special: bool, strips_space: bool, offset: int = 0, written: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._strips_space = strips_space
        self._pending = b""
        self._written = written
        self.offset = offset

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes a token would add if it came next."""
        data = self._visible(token_id)
        return data.removeprefix(b" ") if self._strips_space else data

    def word_of(self, token_id: int) -> str:
        """Return a token alone as text: U+FFFD for parts of characters, its own name if it is special."""
        if self._tokenizer.is_special(token_id):
            return self._tokenizer.token(token_id) or ""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def key_of(self, token_id: int) -> str:
        r"""Return a token as a key: its text, or `bytes:\xe2\x96` where that would be the same for several."""
        if self._tokenizer.is_special(token_id):
            return self._tokenizer.token(token_id) or ""
        data = self.bytes_of(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def push(self, token_id: int) -> int:
        """Take the next token; return the offset of the character that it begins or goes on with."""
        start = self.offset
        data = self._pending + (self._mark_written(token_id) or self.bytes_of(token_id))
        self._strips_space = self._strips_space and not self._visible(token_id)
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        self.offset += len(text)
        return start

    def _mark_written(self, token_id: int) -> bytes:
        """Return a special token that stands here in what was written, rather than having been put around it."""
        mark = (self._tokenizer.token(token_id) or "") if self._tokenizer.is_special(token_id) else ""
        return mark.encode() if self._written.startswith(mark, self.offset) else b""

    def _visible(self, token_id: int) -> bytes:
        is_hidden = self._skips_special and self._tokenizer.is_special(token_id)
        return b"" if is_hidden else self._tokenizer.token_bytes(token_id)


def count_scores(entries: Sequence[TokenLogprobs]) -> int:
    """Return how many candidates are listed, all entries being as long as the first."""
    return len(entries) * (1 + len(entries[0].top)) if entries else 0


async def aside_if_many(num_scores: int, write: Callable[[], T]) -> T:
    """Write scores: here, or in a thread if there are so many that others would have to wait."""
    return write() if num_scores < MANY_SCORES else await asyncio.to_thread(write)


def as_number(logprob: float) -> float:
    """Return a log-probability that JSON can write."""
    return max(logprob, FLOOR) if not math.isnan(logprob) else FLOOR


def chat_logprobs(entries: Iterable[TokenLogprobs], spelling: TokenSpelling) -> list[dict[str, Any]]:
    """Return entries of `choices[].logprobs.content`.

    Mutates: `spelling`, by the tokens.
    """
    content = []
    for entry in entries:
        made = _chat_token(entry.token_id, entry.logprob, spelling)
        made["top_logprobs"] = [_chat_token(token_id, logprob, spelling) for token_id, logprob in entry.top]
        content.append(made)
        spelling.push(entry.token_id)
    return content


def _chat_token(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, Any]:
    return {
        "token": spelling.word_of(token_id),
        "logprob": as_number(logprob),
        "bytes": list(spelling.bytes_of(token_id)),
    }


def completion_logprobs(entries: Sequence[TokenLogprobs | int], spelling: TokenSpelling) -> dict[str, list[Any]]:
    """Return `choices[].logprobs` of completions; a bare id is a token without a score, the first of a prompt.

    Mutates: `spelling`, by the tokens.
    """
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        token_id = entry.token_id if isinstance(entry, TokenLogprobs) else entry
        made["tokens"].append(spelling.key_of(token_id))
        made["token_logprobs"].append(as_number(entry.logprob) if isinstance(entry, TokenLogprobs) else None)
        made["top_logprobs"].append(_top(entry, spelling) if isinstance(entry, TokenLogprobs) else None)
        made["text_offset"].append(spelling.push(token_id))
    return made


def _top(entry: TokenLogprobs, spelling: TokenSpelling) -> dict[str, float]:
    tops = {spelling.key_of(token_id): as_number(logprob) for token_id, logprob in reversed(entry.top)}
    # The chosen token last: it is listed whether or not it is among the likeliest, under its own key.
    return dict(reversed(tops.items())) | {spelling.key_of(entry.token_id): as_number(entry.logprob)}


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: per prompt token its candidates by id; `null` for the first."""
    made: list[dict[str, Any] | None] = [None]
    for entry in entries:
        places = [(entry.token_id, entry.logprob, entry.rank)]
        places += [(id_, logprob, rank) for rank, (id_, logprob) in enumerate(entry.top, 1) if id_ != entry.token_id]
        made.append(
            {
                str(token_id): {
                    "logprob": as_number(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", errors="replace"),
                }
                for token_id, logprob, rank in places
            }
        )
    return made
