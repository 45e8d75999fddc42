"""SentencePieceEncoder: text to ids as SentencePiece's BPE models do it (Llama 2, Mistral): merges driven by scores.

    "Hello you"      a space in front, spaces become marks                  ▁Hello▁you
    symbols          one per character; the adjacent pair whose union is    ▁ H e l l o ▁ y o u
                     the piece with the highest score is merged first, the  ▁ H e ll o ▁ y o u
                     leftmost of equals, until no union is a piece          ▁Hello ▁you
    what is left     pieces become ids, other characters their bytes        15043 366

Written out instead of handed to a merge table: a table has one rank per *pair*, scores belong to *unions*, and where
one union has several pairs (`aa a`, `a aa`) or two pieces share a score, only the rule above breaks ties rightly.

Source: Sennrich et al. 2016; the order of merges is that of the sentencepiece library's BPE model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

from octavo.runtime.vocabulary import SPACE_MARK

_MAX_CACHED_CHARACTERS = 64
_CACHED_WORDS = 1 << 15
_WORDS = re.compile(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+")


class SentencePieceEncoder:
    """Encodes with pieces and scores.

    Args:
        pieces: Piece to id, of those that merging may make and characters may be.
        scores: Score of each piece.
        byte_ids: Id of each byte 0..255, for characters that are no piece; `None` if the vocabulary has no bytes.
        unknown_id: Stands for a run of characters that are no piece where there are no bytes.
        control_ids: Control tokens by their text, recognised only on request.
        added_ids: User-defined tokens by their text, always recognised.
        adds_space: Put a space before a text, and before what follows a control or user-defined token.
    """

    __slots__ = (
        "_added",
        "_adds_space",
        "_byte_ids",
        "_cached_word",
        "_control",
        "_pieces",
        "_scores",
        "_tokens",
        "_unknown_id",
        "_words_are_separate",
    )

    def __init__(
        self,
        *,
        pieces: Mapping[str, int],
        scores: Mapping[str, float],
        byte_ids: Sequence[int] | None,
        unknown_id: int | None,
        control_ids: Mapping[str, int],
        added_ids: Mapping[str, int],
        adds_space: bool,
    ) -> None:
        assert byte_ids is not None or unknown_id is not None, "characters that are no piece need an id"
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._tokens = {**added_ids, **control_ids}
        self._control = _any_of([*added_ids, *control_ids])
        self._added = _any_of(added_ids)
        self._adds_space = adds_space
        # Usually no piece goes on past the end of a word, so that words can be merged apart, and remembered.
        self._words_are_separate = not any(re.search(f"[^{SPACE_MARK}]{SPACE_MARK}", piece) for piece in pieces)
        self._cached_word = lru_cache(maxsize=_CACHED_WORDS)(self._encode_word)

    def encode(self, text: str, *, parse_special: bool, param: str) -> list[int]:
        """Return the ids of a text; see `TextEncoder`."""
        pattern = self._control if parse_special else self._added
        parts = pattern.split(text) if pattern else [text]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:  # what the pattern found lies between what it did not
                ids.append(self._tokens[part])
            elif part:
                ids += self._encode_plain(part)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        marked = (SPACE_MARK if self._adds_space else "") + text.replace(" ", SPACE_MARK)
        if not self._words_are_separate:
            return list(self._encode_word(marked))
        ids: list[int] = []
        for word in _WORDS.findall(marked):
            more = self._cached_word(word) if len(word) <= _MAX_CACHED_CHARACTERS else self._encode_word(word)
            runs_on = bool(ids and more) and ids[-1] == more[0] == self._unknown_id
            ids += more[1:] if runs_on else more
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in self._merge(word):
            known = self._pieces.get(piece)
            if known is not None:
                ids.append(known)
            elif self._byte_ids is not None:
                ids += [self._byte_ids[byte] for byte in piece.encode("utf-8")]
            elif self._unknown_id is not None and ids[-1:] != [self._unknown_id]:
                ids.append(self._unknown_id)
        return tuple(ids)

    def _merge(self, word: str) -> list[str]:
        """Return the symbols that are left when no two neighbours make a piece. O(n log n) in characters."""
        symbols = list(word)  # a symbol stands at the place of its first character; "" where it was merged away
        num_symbols = len(symbols)
        before = list(range(-1, num_symbols - 1))
        after = list(range(1, num_symbols + 1))
        scores = self._scores
        pairs: list[tuple[float, int, int, str]] = []
        for left in range(num_symbols - 1):
            union = symbols[left] + symbols[left + 1]
            if union in scores:
                pairs.append((-scores[union], left, left + 1, union))
        heapify(pairs)
        while pairs:
            _, left, right, union = heappop(pairs)
            # Stale where either symbol has changed since; both only grow, so the length tells.
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(union):
                continue
            symbols[left], symbols[right] = union, ""
            follower = after[left] = after[right]
            if follower < num_symbols:
                before[follower] = left
                wider = union + symbols[follower]
                if wider in scores:
                    heappush(pairs, (-scores[wider], left, follower, wider))
            leader = before[left]
            if leader >= 0:
                wider = symbols[leader] + union
                if wider in scores:
                    heappush(pairs, (-scores[wider], leader, left, wider))
        return [symbol for symbol in symbols if symbol]


def _any_of(tokens: Sequence[str] | Mapping[str, int]) -> re.Pattern[str] | None:
    """Return a pattern of the tokens, the longest first; `None` if there are none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None
