"""Divergence: how far distributions over the vocabulary are from exact ones, position by position, in nats.

Logits with a NaN or an infinity among them are no distribution: as far from an exact one as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceSummary:
    """What a range of positions came to.

    Args:
        kl_mean, kl_p99: Kullback-Leibler divergence of what was found from what is exact; infinite where that is no
            distribution.
        top1_agreement_ratio: Share of positions where both hold the same token likeliest.
        perplexity, exact_perplexity: Exponential of the mean negative log-probability of the text's next tokens.
    """

    num_positions: int
    kl_mean: float
    kl_p99: float
    top1_agreement_ratio: float
    perplexity: float
    exact_perplexity: float


def log_softmax(logits: Logits) -> Logprobs:
    """Return natural logarithms of probabilities, row by row, in double precision.

    A row that is no distribution becomes NaN throughout.
    """
    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        shifted -= shifted.max(axis=1, keepdims=True)
        total = np.exp(shifted).sum(axis=1, keepdims=True)
    shifted -= np.log(total)
    return shifted


def are_distributions(logprobs: Logprobs) -> bool:
    """Return whether all rows are distributions."""
    return not np.isnan(logprobs).any()


class Divergence:
    """Collects rows as a text is read."""

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._agrees: list[bool] = []
        self._nll: list[float] = []
        self._exact_nll: list[float] = []

    def add(self, exact: Logprobs, found: Logprobs, next_ids: Sequence[int]) -> None:
        """Compare rows `[num_rows, vocab_size]` whose next tokens are known."""
        rows, columns = np.arange(len(next_ids)), np.asarray(next_ids, np.int64)
        is_none = np.isnan(found).any(axis=1)
        kl = (np.exp(exact) * (exact - found)).sum(axis=1)
        agrees = exact.argmax(axis=1) == found.argmax(axis=1)
        self._kl += np.where(is_none, np.inf, kl).tolist()
        self._agrees += (agrees & ~is_none).tolist()
        self._nll += np.where(is_none, np.inf, -found[rows, columns]).tolist()
        self._exact_nll += (-exact[rows, columns]).tolist()

    def summary(self, first: int = 0, end: int | None = None) -> DivergenceSummary:
        """Sum up the positions `first` to `end - 1`."""
        part = slice(first, end)
        kl = np.array(self._kl[part])
        return DivergenceSummary(
            num_positions=len(kl),
            # Rounding can leave a mean of zeros a hair below zero.
            kl_mean=max(0.0, float(kl.mean())),
            kl_p99=max(0.0, _quantile(kl, 0.99)),
            top1_agreement_ratio=float(np.mean(self._agrees[part])),
            perplexity=float(np.exp(np.mean(self._nll[part]))),
            exact_perplexity=float(np.exp(np.mean(self._exact_nll[part]))),
        )


def _quantile(values: npt.NDArray[np.float64], share: float) -> float:
    """Return a quantile, infinite where that lies between a number and infinity."""
    with np.errstate(invalid="ignore"):
        found = float(np.quantile(values, share))
    return np.inf if np.isnan(found) else found
