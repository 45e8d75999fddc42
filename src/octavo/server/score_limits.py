"""ScoreLimits: how many log-probabilities one request may ask for, and all that are being answered together.

A score is one candidate of one token. Until its answer has been written it takes some 600 bytes, and then 100 of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError, QueueFullError

MAX_PROMPT_SCORES = 2**18
"""Of prompt tokens in one answer, all its choices together."""
MAX_OUTPUT_SCORES = 2**19
"""Of output tokens in one answer, all its choices together; 300 MB while it is made."""
MAX_HELD_SCORES = 2**22
"""Of all answers that are being made, 2.5 GB if every one came to be."""
RETRY_AFTER_S = 5


class ScoreLimits:
    """Counts what has been promised to the requests of one server; for its event loop."""

    def __init__(self) -> None:
        self._num_held = 0

    def hold(self, num_scores: int) -> None:
        """Promise scores to a request; `release` them when it has been answered.

        Raises:
            QueueFullError: too many are promised to others.
        """
        if self._num_held and self._num_held + num_scores > MAX_HELD_SCORES:
            raise QueueFullError(
                f"answers with up to {self._num_held:,} log-probabilities are being made, {num_scores:,} more is too"
                " many",
                retry_after_s=RETRY_AFTER_S,
                because=f"{MAX_HELD_SCORES:,} are kept at a time",
                hints=("ask for fewer candidates, or for fewer tokens with max_tokens",),
            )
        self._num_held += num_scores

    def release(self, num_scores: int) -> None:
        """Take a promise back."""
        self._num_held -= num_scores
        assert self._num_held >= 0, "scores were released twice"


def count_prompt_scores(params: SamplingParams, num_prompt_tokens: int, *, param: str, num_listed: int = 1) -> int:
    """Return how many scores of prompt tokens an answer lists.

    Args:
        param: The field that asks for them.
        num_listed: How often they are listed: once, or by each choice.

    Raises:
        InvalidParameterError: more than would be good for the memory.
    """
    if params.prompt_logprobs is None:
        return 0
    num_scores = num_prompt_tokens * (params.prompt_logprobs + 1) * num_listed
    if num_scores > MAX_PROMPT_SCORES:
        raise InvalidParameterError(
            f"the answer would list {num_scores:,} scores of prompt tokens",
            param=param,
            because=f"at most {MAX_PROMPT_SCORES:,} are listed, all choices together",
            hints=("ask for fewer candidates, fewer answers, or send shorter prompts",),
        )
    return num_scores


def count_output_scores(
    params: SamplingParams, nums_prompt_tokens: Sequence[int], *, longest_tokens: int, param: str
) -> int:
    """Return how many scores of output tokens an answer can come to list.

    Args:
        nums_prompt_tokens: The length of each prompt.
        longest_tokens: Most tokens of a prompt and an answer together.
        param: The field that asks for them.

    Raises:
        InvalidParameterError: more than would be good for the memory.
    """
    if params.logprobs is None:
        return 0
    each = params.n * (params.logprobs + 1)
    lengths = [max(0, longest_tokens - num) for num in nums_prompt_tokens]
    if params.max_tokens is not None:
        lengths = [min(length, params.max_tokens) for length in lengths]
    num_scores = each * sum(lengths)
    if num_scores > MAX_OUTPUT_SCORES:
        fits = MAX_OUTPUT_SCORES // (each * len(lengths))
        raise InvalidParameterError(
            f"the answer could list {num_scores:,} scores of output tokens",
            param=param,
            because=f"at most {MAX_OUTPUT_SCORES:,} are listed, all choices together",
            hints=(f"max_tokens up to {fits:,}" if fits else "ask for fewer answers", "ask for fewer candidates"),
        )
    return num_scores
