"""What a request consists of, as far as the scheduler and the prefix cache need to know.

Content is a seam: requests that run on a model are backed by token ids; requests replayed from a public trace will be
backed by the trace's block hashes. Both say how many tokens there are and give bytes that identify a range of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from octavo.units import TokenId

TOKEN_BYTES = 4
"""Identity bytes per token: ids are 32-bit, in the machine's byte order."""


class Content(Protocol):
    """The known tokens of a request: its prompt, then its output so far."""

    def __len__(self) -> int:
        """Return the number of known tokens."""

    def identity(self, start: int, stop: int) -> bytes:
        """Return bytes equal for two contents exactly if their tokens `start..stop - 1` are equal."""

    def token_ids(self, start: int, stop: int) -> array[int]:
        """Return the ids a runner computes for positions `start..stop - 1`."""

    def append(self, token_id: TokenId) -> None:
        """Add an output token."""


class TokenContent:
    """Content backed by token ids."""

    __slots__ = ("_ids",)

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._ids = array("i", token_ids)
        assert self._ids.itemsize == TOKEN_BYTES

    def __len__(self) -> int:
        return len(self._ids)

    def identity(self, start: int, stop: int) -> bytes:
        return self._ids[start:stop].tobytes()

    def token_ids(self, start: int, stop: int) -> array[int]:
        return self._ids[start:stop]

    def append(self, token_id: TokenId) -> None:
        self._ids.append(token_id)


def common_tokens(first: bytes, second: bytes) -> int:
    """Return how many leading tokens two identities share."""
    limit = min(len(first), len(second)) // TOKEN_BYTES
    for index in range(limit):
        at = index * TOKEN_BYTES
        if first[at : at + TOKEN_BYTES] != second[at : at + TOKEN_BYTES]:
            return index
    return limit


def token_at(identity: bytes, index: int) -> TokenId:
    """Return the id of one token of an identity; a mere number where content is not backed by token ids."""
    return TokenId(array("i", identity[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES])[0])
