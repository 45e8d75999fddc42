"""Passkey retrieval: a number hidden in a long text, asked for at its end.

The usual test of whether a cache still holds what was said long ago: nothing else in the text helps to guess it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.runtime.tokenizer import Tokenizer

PASSKEY_DEPTHS = (0.1, 0.5, 0.9)
"""Where it is hidden, as a share of the text before the question."""

MAX_ANSWER_TOKENS = 12
"""Read after the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passkey:
    """A prompt with a number in it, and the number."""

    token_ids: tuple[int, ...]
    key: str
    depth_ratio: float


def make_passkey(tokenizer: Tokenizer, filler_ids: Sequence[int], *, length_tokens: int, depth_ratio: float) -> Passkey:
    """Hide a number in a filler text.

    Args:
        filler_ids: Tokens of a text long enough.
        length_tokens: Tokens of the whole prompt, at most those of the filler.
    """
    # Different numbers at different places, so that no answer can come from another prompt.
    key = str(10_000 + (7919 * length_tokens + round(1000 * depth_ratio) * 104_729) % 90_000)
    hint = tokenizer.encode(
        f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n", add_special_tokens=False
    )
    question = tokenizer.encode("\n\nWhat is the pass key? The pass key is", add_special_tokens=False)
    num_filler = length_tokens - len(hint) - len(question)
    assert num_filler > 0, "a passkey needs room for its hint and its question"
    num_before = int(num_filler * depth_ratio)
    filler = filler_ids[:num_filler]
    token_ids = (*filler[:num_before], *hint, *filler[num_before:], *question)
    return Passkey(token_ids=tuple(token_ids), key=key, depth_ratio=depth_ratio)
