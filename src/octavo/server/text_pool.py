"""TextPool: threads that tokenise and format, so that a long prompt holds up nobody's stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.errors import QueueFullError

NUM_THREADS = 2
NICENESS = 5
"""How much less urgent than a step of the engine. With as many threads as cores, each step would wait for the one that
shares its core with half a second of tokenising."""
MAX_PENDING = 1024
MAX_PENDING_CHARS = 64 * 1024 * 1024

T = TypeVar("T")


class TextPool:
    """A few threads and a bounded queue before them. For one event loop.

    Work that nobody waits for any more is not started; what has been started runs to its end, which texts and chat
    templates have: both are limited.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="octavo-text", initializer=_stand_back)
        self._num_pending = 0
        self._num_chars = 0

    async def run(self, work: Callable[[], T], *, num_chars: int = 0) -> T:
        """Do work in a thread.

        Args:
            num_chars: Length of the text it is about.

        Raises:
            QueueFullError: too much waits already.
        """
        if self._num_pending >= MAX_PENDING or (self._num_pending and self._num_chars + num_chars > MAX_PENDING_CHARS):
            raise QueueFullError(f"{self._num_pending:,} prompts wait to be read", retry_after_s=1)
        self._num_pending += 1
        self._num_chars += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._num_pending -= 1
            self._num_chars -= num_chars

    def close(self) -> None:
        """Start nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _stand_back() -> None:
    """Let the engine's threads go first; threads that the tokenizer starts from this one do so, too."""
    if sys.platform == "linux":  # elsewhere it would be the whole process that stands back
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
