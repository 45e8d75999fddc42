"""The sampler: from a row of logits to one token, and to log-probabilities.

This is the definition that every runner's sampler follows. All arithmetic after the logits is float64, with the
exponential, the sums and the random numbers of `portable_math.py` and `counter_rng.py`, so that samplers can agree to
the bit. A row is treated alone: nothing depends on other rows.

    adjust     ids not allowed to -inf;  + logit_bias;  banned ids to -inf;  repetition, frequency, presence penalty
    greedy     (temperature 0) the highest adjusted logit, ties to the lowest id
    weigh      w = portable_exp((adjusted - highest) / temperature); tokens with w = 0 drop out
    min_p      keep w >= min_p
    top_k      keep the first k in canonical order: adjusted logit descending, ties by id
    top_p      in canonical order, keep tokens up to the first at which the running sum of w reaches top_p * total,
               where total = lane_sum of all kept w by id (dropped ids count as 0)
    draw       by ascending id, the first token at which the running sum of w exceeds u * (sum of all), with
               u = uniform(seed, position); the last kept token should rounding leave none

Drawing by ascending id rather than in canonical order gives the same distribution and needs no sort; only top_p has to
sort, and only as many tokens as it keeps.
"""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from octavo.core.sampling import SamplingParams
from octavo.core.step import SampledToken, SampleRow, TokenLogprobs
from octavo.errors import ModelNumbersError
from octavo.runtime.counter_rng import uniform
from octavo.runtime.portable_math import lane_sum, portable_exp
from octavo.units import RequestId, TokenId, cdiv

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
TokenIds = NDArray[np.intp]


def sample(logits: Float32, row: SampleRow) -> SampledToken:
    """Choose one token.

    Args:
        logits: `[vocab_size]`, as the model gave them.
    """
    check_logits(logits, row.request_id, f"choosing the token at position {row.position}")
    adjusted = adjust(logits.astype(np.float64), row)
    if row.params.is_greedy:
        token_id = int(np.argmax(adjusted))  # the first of equals, so the lowest id
    else:
        kept, weights = candidates(adjusted, row.params)
        token_id = draw(kept, weights, uniform(row.seed, row.position))
    num_top = row.params.logprobs
    logprobs = None if num_top is None else token_logprobs(logits, token_id, num_top)
    return SampledToken(request_id=row.request_id, token_id=TokenId(token_id), logprobs=logprobs)


def check_logits(logits: Float32, request_id: RequestId, doing: str) -> None:
    """Check that a row holds no NaN and no +inf, and something above -inf.

    Raises:
        ModelNumbersError: it is no distribution.
    """
    highest = logits.max()
    if not np.isfinite(highest):
        raise no_distribution(f"{doing}, the highest of {len(logits):,} logits is {highest}", request_id)


def no_distribution(what: str, request_id: RequestId) -> ModelNumbersError:
    """Return the error about logits that no token can be drawn from."""
    return ModelNumbersError(
        f"request {request_id}: {what}",
        because="the model's weights hold NaN or infinity, or its sums leave float32",
        hints=("fetch the model's file anew; if it is as it should be, report this with the model's name",),
    )


def adjust(logits: Float64, row: SampleRow) -> Float64:
    """Return the logits after the mask, bias, bans and penalties. Mutates nothing."""
    adjusted = logits.copy()
    if row.allowed_tokens is not None:
        adjusted[~_unpack(row.allowed_tokens, len(logits))] = -np.inf
    params = row.params
    for token_id, bias in params.logit_bias.items():
        adjusted[_checked(token_id, logits)] += bias
    for token_id in row.banned_token_ids:
        adjusted[_checked(token_id, logits)] = -np.inf
    if params.has_penalties:
        _penalise(adjusted, row)
    assert adjusted.max() > -np.inf, f"request {row.request_id}: every token is banned"
    return adjusted


def candidates(adjusted: Float64, params: SamplingParams) -> tuple[TokenIds, Float64]:
    """Return the tokens that may be drawn, ids ascending and at least one, with their weights (1 for the likeliest).

    A temperature next to zero sends all weights but the highest one's to 0: it equals greedy, with ties drawn evenly.
    """
    with np.errstate(over="ignore"):  # -inf weighs 0
        weights = portable_exp((adjusted - adjusted.max()) / params.temperature)
    kept = np.flatnonzero(weights >= max(params.min_p, np.nextafter(0.0, 1.0)))
    if 0 < params.top_k < len(kept):
        kept = _top_k(adjusted, kept, params.top_k)
    if params.top_p < 1.0:
        kept = _top_p(adjusted, weights, kept, params.top_p)
    return kept, weights[kept]


def draw(kept: TokenIds, weights: Float64, u: float) -> int:
    """Return the token whose share of [0, 1) holds `u`, tokens side by side by ascending id."""
    running = np.add.accumulate(weights)
    index = int(np.searchsorted(running, u * running[-1], side="right"))
    return int(kept[min(index, len(kept) - 1)])


def token_logprobs(logits: Float32, token_id: int, num_top: int) -> TokenLogprobs:
    """Return a token's log-probability under the model, its rank, and the `num_top` likeliest tokens.

    `logprob = (x - highest) - log(lane_sum(portable_exp(x - highest)))` of the logits as the model gave them. Rank and
    order are canonical: logit descending, ties by id. More than the vocabulary gives the whole vocabulary.
    """
    below = logits.astype(np.float64) - float(logits.max())
    log_sum = math.log(lane_sum(portable_exp(below)))
    own = below[_checked(token_id, below)]
    rank = 1 + np.count_nonzero(below > own) + np.count_nonzero(below[:token_id] == own)
    top: TokenIds = np.empty(0, np.intp)
    if num_top:
        top = _canonical_order(below, _top_k(below, np.arange(len(below)), min(num_top, len(below))))
    return TokenLogprobs(
        token_id=TokenId(token_id),
        logprob=float(own) - log_sum,
        rank=int(rank),
        top=tuple((TokenId(int(one)), float(below[one]) - log_sum) for one in top),
    )


def _penalise(adjusted: Float64, row: SampleRow) -> None:
    """Apply the three penalties in place. Repetition sees prompt and output, the other two count the output alone."""
    params = row.params
    seen = np.unique(np.concatenate([_ids(row.prompt_token_ids, adjusted), _ids(row.output_token_ids, adjusted)]))
    repeated = adjusted[seen]
    penalty = params.repetition_penalty
    adjusted[seen] = np.where(repeated > 0, repeated / penalty, repeated * penalty)
    generated, counts = np.unique(_ids(row.output_token_ids, adjusted), return_counts=True)
    adjusted[generated] -= params.frequency_penalty * counts
    adjusted[generated] -= params.presence_penalty


def _top_k(scores: Float64, kept: TokenIds, k: int) -> TokenIds:
    """Return the first `k` of the kept tokens in canonical order, ids ascending."""
    values = scores[kept]
    kth = np.partition(values, len(values) - k)[len(values) - k]
    above = kept[values > kth]
    ties = kept[values == kth][: k - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _top_p(scores: Float64, weights: Float64, kept: TokenIds, top_p: float) -> TokenIds:
    """Return the shortest start of the canonical order whose weight reaches its share of the total, ids ascending."""
    ordered = _canonical_order(scores, kept)
    by_id = np.zeros_like(weights)
    by_id[kept] = weights[kept]
    reached = np.searchsorted(np.add.accumulate(weights[ordered]), top_p * lane_sum(by_id), side="left")
    return np.sort(ordered[: reached + 1])


def _canonical_order(scores: Float64, ids: TokenIds) -> TokenIds:
    """Sort ascending ids by score descending, ties by id."""
    return ids[np.argsort(-scores[ids], kind="stable")]


def _unpack(allowed_tokens: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Return a mask of one bit per id as booleans, `[vocab_size]`."""
    assert len(allowed_tokens) == 4 * cdiv(vocab_size, 32), "a mask has one bit per id, in words of 32"
    bits = np.unpackbits(np.frombuffer(allowed_tokens, np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)


def _ids(token_ids: array[int], logits: Float64) -> TokenIds:
    ids = np.asarray(token_ids, np.intp)
    assert np.all((ids >= 0) & (ids < len(logits))), "a token id is not in the vocabulary"
    return ids


def _checked(token_id: int, logits: Float64) -> int:
    assert 0 <= token_id < len(logits), f"token id {token_id} is not in the vocabulary of {len(logits)}"
    return token_id
