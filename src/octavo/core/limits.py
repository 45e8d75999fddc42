"""Limits of a step and a request, and what is refused on arrival because it could never fit."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.request import Request
from octavo.errors import InvalidParameterError, RequestTooLongError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a step and a request.

    Args:
        max_model_len: Most prompt + output tokens of one request.
        max_num_seqs: Most running requests (seats).
        max_num_batched_tokens: Most tokens computed in one step; at least `max_num_seqs`, so that every running
            request can decode in every step.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidParameterError(
                f"{self.max_num_batched_tokens} tokens a step are fewer than max_num_seqs={self.max_num_seqs}",
                param="max_num_batched_tokens",
                because="every running request may need one token in a step",
                hints=(f"set max_num_batched_tokens to {self.max_num_seqs} or more, or max_num_seqs lower",),
            )


def longest_request_tokens(limits: Limits, longest_cached_tokens: int) -> int:
    """Return the most prompt + output tokens of one request.

    The last output token is chosen and never read again, so it needs no place in the cache.
    """
    return min(limits.max_model_len, longest_cached_tokens + 1)


def check_fits(request: Request, limits: Limits, longest_cached_tokens: int) -> None:
    """Refuse a request that could not finish even alone.

    Args:
        longest_cached_tokens: Most tokens of one request that the KV cache holds.

    Raises:
        RequestTooLongError: with the length that would fit.
        InvalidParameterError: the prompt is empty.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise InvalidParameterError("the prompt has no tokens", param="prompt", hints=("send at least one token",))
    max_tokens = request.params.max_tokens
    wanted = 1 if max_tokens is None else max_tokens
    longest = (
        longest_request_tokens(limits, longest_cached_tokens)
        if wanted
        else min(limits.max_model_len, longest_cached_tokens)
    )
    if num_prompt + wanted <= longest:
        return
    room = longest - num_prompt
    raise RequestTooLongError(
        f"a prompt of {num_prompt:,} tokens and {wanted:,} output tokens need {num_prompt + wanted:,} tokens, "
        f"{longest:,} is the most one request can have",
        num_prompt_tokens=num_prompt,
        max_tokens=wanted,
        longest_tokens=longest,
        because=f"max_model_len is {limits.max_model_len:,} tokens and the KV pool holds "
        f"{longest_cached_tokens:,} tokens of one request",
        hints=(
            f"ask for at most {room:,} output tokens"
            if room > 0
            else f"shorten the prompt to at most {longest - wanted:,} tokens",
        )
        if longest > wanted or room > 0
        else (),
    )
