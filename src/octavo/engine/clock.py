"""MonotonicClock: real time for the engine."""

from __future__ import annotations

import time


class MonotonicClock:
    """Implements `Clock` with the system's monotonic clock."""

    def now_s(self) -> float:
        return time.perf_counter()
