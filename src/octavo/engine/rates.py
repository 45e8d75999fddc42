"""RateWindow: how often something happened in the last minute, in constant memory."""

from __future__ import annotations


class RateWindow:
    """A sum over the last `window_s` seconds, kept in one cell per second.

    Args:
        window_s: Whole seconds looked back.
        now_s: Time of the start; a rate is over the time since then while that is shorter than the window.
    """

    __slots__ = ("_cells", "_second", "_start_s", "_window_s")

    def __init__(self, *, now_s: float, window_s: int = 60) -> None:
        self._window_s = window_s
        self._start_s = now_s
        self._second = int(now_s)
        self._cells = [0.0] * window_s

    def add(self, now_s: float, amount: float = 1.0) -> None:
        """Note that something happened."""
        self._advance(now_s)
        self._cells[self._second % self._window_s] += amount

    def total(self, now_s: float) -> float:
        """Return the sum over the window."""
        self._advance(now_s)
        return sum(self._cells)

    def per_s(self, now_s: float) -> float:
        """Return the sum over the window, per second; over at least one second."""
        return self.total(now_s) / min(float(self._window_s), max(1.0, now_s - self._start_s))

    def _advance(self, now_s: float) -> None:
        """Clear the cells of the seconds that nothing was noted in."""
        second = int(now_s)
        for passed in range(max(self._second + 1, second - self._window_s + 1), second + 1):
            self._cells[passed % self._window_s] = 0.0
        self._second = max(self._second, second)
