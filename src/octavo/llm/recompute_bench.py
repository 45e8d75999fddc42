"""What the KV cache saves: a token with the cache against a token for which the whole prefix is computed anew.

Both are measured on the same engine, with the prefix cache off. A long request decodes a few tokens; then, for the same
contexts, a request of prompt plus answer so far asks for one token, which is the work of a decoder without a cache. By
the engine's contract both find the same token. No printing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from octavo.core.sampling import SamplingParams
from octavo.engine.messages import EngineRequest
from octavo.errors import InvalidParameterError
from octavo.llm.offline import LLM

DECODED_TOKENS = 16
"""Tokens timed with the cache; their contexts are 1 to 16 tokens longer than the length they stand for."""

OnProgress = Callable[[int, int], None]
"""Called with the tokens computed so far and in all: the time goes mostly into them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePoint:
    """One length.

    Args:
        cached_s: A token with the KV cache, median of `DECODED_TOKENS`.
        recomputed_s: A token by computing all tokens before it, median of `num_repeats`.
        are_tokens_equal: Both ways chose the same tokens.
    """

    context_tokens: int
    cached_s: float
    recomputed_s: float
    num_repeats: int
    are_tokens_equal: bool

    @property
    def ratio(self) -> float:
        return self.recomputed_s / self.cached_s


def run_recompute(
    llm: LLM, lengths: Sequence[int], *, num_repeats: int, on_progress: OnProgress | None = None
) -> list[RecomputePoint]:
    """Measure each length in ascending order.

    Args:
        llm: An engine without a prefix cache, with nothing running.
        num_repeats: Tokens recomputed per length, at most `DECODED_TOKENS`.

    Raises:
        InvalidParameterError: a length does not fit into the engine, or the repeats are out of range.
    """
    _check(llm, lengths, num_repeats)
    bench = _Bench(llm, num_repeats, on_progress)
    bench.warm_up()
    bench.num_tokens = sum((1 + num_repeats) * length for length in lengths)
    return [bench.measure(length) for length in sorted(lengths)]


def total_s(points: Sequence[RecomputePoint], *, is_cached: bool) -> list[float]:
    """Return, for each length, the estimated seconds for writing so many tokens one after the other.

    The times per token between measured lengths are taken as straight lines; an empty context as costing what a cached
    token does at the shortest length.
    """
    seconds, last_tokens, last_s, totals = 0.0, 0, points[0].cached_s, []
    for point in points:
        token_s = point.cached_s if is_cached else point.recomputed_s
        seconds += (point.context_tokens - last_tokens) * (token_s + last_s) / 2
        last_tokens, last_s = point.context_tokens, token_s
        totals.append(seconds)
    return totals


def _check(llm: LLM, lengths: Sequence[int], num_repeats: int) -> None:
    if not 1 <= num_repeats <= DECODED_TOKENS:
        raise InvalidParameterError(f"{num_repeats} is not from 1 to {DECODED_TOKENS}", param="--repeats")
    longest = llm.engine.longest_request_tokens - DECODED_TOKENS - 1
    if max(lengths) > longest:
        raise InvalidParameterError(
            f"a context of {max(lengths):,} tokens does not fit, {max(longest, 0):,} would",
            param="--lengths",
            because=f"a request may have {llm.engine.longest_request_tokens:,} tokens here,"
            f" and {DECODED_TOKENS + 1} are for the answer",
            hints=(f"`--lengths {','.join(str(each) for each in sorted(lengths) if each <= longest) or longest}`",)
            if longest >= 1
            else (),
        )


class _Bench:
    """Runs single requests and keeps count of the tokens computed.

    Args:
        num_repeats: As for `run_recompute`.
    """

    def __init__(self, llm: LLM, num_repeats: int, on_progress: OnProgress | None) -> None:
        self._engine = llm.engine
        self._vocab_size = llm.vocab_size
        self._num_repeats = num_repeats
        self._on_progress = on_progress
        self._num_done = 0
        self.num_tokens = 0

    def warm_up(self) -> None:
        """Touch the weights and the arrays of a step once."""
        self._answer(tuple(range(min(64, self._vocab_size))), 4)
        self._num_done = 0

    def measure(self, length: int) -> RecomputePoint:
        random = Random(length)
        prompt = tuple(random.randrange(self._vocab_size) for _ in range(length))
        answer, seconds = self._answer(prompt, 1 + DECODED_TOKENS)
        self._advance(length)
        found, recomputed_s = [], []
        for index in range(1, 1 + self._num_repeats):
            (token_id,), (token_s,) = self._answer(prompt + tuple(answer[:index]), 1)
            self._advance(length)
            found.append(token_id)
            recomputed_s.append(token_s)
        return RecomputePoint(
            context_tokens=length,
            cached_s=median(seconds[1:]),
            recomputed_s=median(recomputed_s),
            num_repeats=self._num_repeats,
            are_tokens_equal=found == answer[1 : 1 + self._num_repeats],
        )

    def _answer(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[float]]:
        """Return the tokens of an answer and the seconds that each took; the first one includes the prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        token_ids: list[int] = []
        seconds: list[float] = []
        start_s = time.perf_counter()
        self._engine.add(EngineRequest(request_id="bench", prompt_token_ids=prompt, params=params))
        while self._engine.has_unfinished:
            for delta in self._engine.step():
                if delta.token_ids:
                    now_s = time.perf_counter()
                    seconds.append(now_s - start_s)
                    start_s = now_s
                    token_ids.extend(int(token_id) for token_id in delta.token_ids)
        assert len(seconds) == len(token_ids) == num_tokens, "a step yields one token of a request"
        return token_ids, seconds

    def _advance(self, num_tokens: int) -> None:
        self._num_done += num_tokens
        if self._on_progress is not None:
            self._on_progress(self._num_done, self.num_tokens)
