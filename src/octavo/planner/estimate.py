"""Estimate: a number of bytes with the interval it is expected in, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes that are known exactly, or to within an interval.

    Args:
        low_bytes, high_bytes: The true value is expected between them, ends included, nineteen times out of twenty.
        value_bytes: The best single figure.
        source: Rule or document, dated where it can age.
    """

    low_bytes: int
    value_bytes: int
    high_bytes: int
    source: str

    def __post_init__(self) -> None:
        assert self.low_bytes <= self.value_bytes <= self.high_bytes, self

    @property
    def is_exact(self) -> bool:
        return self.low_bytes == self.high_bytes

    def holds(self, num_bytes: float) -> bool:
        """Say whether a measured figure lies in the interval."""
        return self.low_bytes <= num_bytes <= self.high_bytes


def exact(num_bytes: int, *, source: str) -> Estimate:
    """Return what is known to the byte."""
    return Estimate(low_bytes=num_bytes, value_bytes=num_bytes, high_bytes=num_bytes, source=source)


def around(value_bytes: float, *, below: float, above: float, source: str) -> Estimate:
    """Return an estimate from its best figure and the distances to both ends, in bytes; nothing falls below 0."""
    value = max(0, int(value_bytes))
    return Estimate(
        low_bytes=max(0, value - int(below)), value_bytes=value, high_bytes=value + int(above), source=source
    )


def remainder(whole: Estimate, *parts: Estimate, source: str) -> Estimate:
    """Return what `parts` leave of `whole`; negative where they do not fit.

    The parts err independently, so their distances add as squares do, not as if all were at their worst at once.
    """
    value = whole.value_bytes - sum(part.value_bytes for part in parts)
    below = (whole.value_bytes - whole.low_bytes) ** 2 + sum((p.high_bytes - p.value_bytes) ** 2 for p in parts)
    above = (whole.high_bytes - whole.value_bytes) ** 2 + sum((p.value_bytes - p.low_bytes) ** 2 for p in parts)
    return Estimate(
        low_bytes=value - int(below**0.5), value_bytes=value, high_bytes=value + int(above**0.5), source=source
    )


def share(whole: Estimate, ratio: float) -> Estimate:
    """Return `ratio` of a figure, e.g. what an engine may use of a device's memory."""
    return Estimate(
        low_bytes=int(whole.low_bytes * ratio),
        value_bytes=int(whole.value_bytes * ratio),
        high_bytes=int(whole.high_bytes * ratio),
        source=f"{whole.source}; {ratio:g} of it",
    )
