"""Threads that read prompts."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from octavo.server.text_pool import NICENESS, TextPool


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_reading_prompts_is_less_urgent_than_everything_else():
    """And the process, with the engine's threads in it, stays as urgent as it was."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    pool = TextPool()
    try:
        own = asyncio.run(pool.run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    finally:
        pool.close()

    assert own == min(19, before + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
