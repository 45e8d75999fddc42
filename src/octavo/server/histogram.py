"""Histogram: how often values fell into fixed ranges, kept as plain numbers that another thread may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts of values by range, and their sum.

    One thread observes, another may read `buckets` at any time: counts only grow, and a reader sees each value or does
    not yet.

    Args:
        bounds: Upper ends of the ranges, ascending; a last range without end is added.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper end, values up to it) as Prometheus wants them: cumulative, the last end `+Inf`."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, None), list(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else f"{bound:g}", float(total)))
        return buckets
