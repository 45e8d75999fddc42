"""RollingHistogram: percentiles of the last minute, in constant memory."""

from __future__ import annotations

from bisect import bisect_left

_PER_DECADE = 40
_BOUNDS_S = tuple(10 ** (step / _PER_DECADE) for step in range(-5 * _PER_DECADE, 5 * _PER_DECADE + 1))
_SLOT_S = 10
_NUM_SLOTS = 7


class RollingHistogram:
    """Counts of seconds by range, one set of counts per ten seconds; sets older than a minute are dropped.

    Ranges widen by 6% from 10 microseconds to a day, so a percentile is at most that much too high.
    """

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[int, list[int]] = {}

    def add(self, now_s: float, value_s: float) -> None:
        """Count a value that became known now. `now_s` never goes back."""
        slot = int(now_s) // _SLOT_S
        counts = self._slots.get(slot)
        if counts is None:
            self._drop_before(slot - _NUM_SLOTS + 1)
            counts = self._slots[slot] = [0] * (len(_BOUNDS_S) + 1)
        counts[bisect_left(_BOUNDS_S, value_s)] += 1

    def percentiles(self, now_s: float, percents: tuple[int, ...]) -> tuple[float | None, ...]:
        """Return, for each percentage, a value that so many percent do not exceed; all `None` without values."""
        self._drop_before(int(now_s) // _SLOT_S - _NUM_SLOTS + 1)
        counts = [sum(column) for column in zip(*self._slots.values(), strict=True)]
        total = sum(counts)
        if total == 0:
            return (None,) * len(percents)
        return tuple(_at(counts, -(-total * percent // 100)) for percent in percents)

    def _drop_before(self, first: int) -> None:
        for slot in [slot for slot in self._slots if slot < first]:
            del self._slots[slot]


def _at(counts: list[int], rank: int) -> float:
    """Return the upper end of the range that holds the value with this rank, counted from 1."""
    seen = 0
    for bound, count in zip(_BOUNDS_S, counts, strict=False):
        seen += count
        if seen >= rank:
            return bound
    return _BOUNDS_S[-1]
