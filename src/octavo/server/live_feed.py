"""LiveFeed: snapshots of the pool for every open page, taken once however many look.

A snapshot is taken when somebody is due for one and the last is too old, never in the background. A page that reads
slowly sees fewer of them; nothing is queued.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from octavo.errors import EngineStoppedError
from octavo.server.errors import ApiError
from octavo.server.json_body import dump_json

PERIOD_S = 0.5
PATIENCE_S = 10.0
"""After so long without a snapshot (a long step, a stall) a comment says that the stream lives."""
MAX_STREAMS = 32

Take = Callable[[], Awaitable[Mapping[str, Any]]]


class LiveFeed:
    """Frames for `/live`.

    Args:
        take: Returns a snapshot as a document of the form `octavo.kv/1`.
        is_over: Whether there will be nothing more to see; ends all streams, so that they keep no server from stopping.
    """

    def __init__(self, take: Take, is_over: Callable[[], bool], *, period_s: float = PERIOD_S) -> None:
        self._take = take
        self._is_over = is_over
        self._period_s = period_s
        self._lock = asyncio.Lock()
        self._taken_s = float("-inf")
        self._frame = b""
        self._num_streams = 0

    def open(self) -> AsyncIterator[bytes]:
        """Return a stream of server-sent events.

        Raises:
            ApiError: 429, too many are open.
        """
        if self._num_streams >= MAX_STREAMS:
            raise ApiError(
                429,
                f"{MAX_STREAMS} pages look at this server already",
                code="too-many-pages",
                headers={"Retry-After": "10"},
            )
        # Counted here, and until nobody has it any more: it may be left before it has been read from.
        self._num_streams += 1
        stream = self._stream()
        weakref.finalize(stream, self._note_end).atexit = False
        return stream

    def _note_end(self) -> None:
        self._num_streams -= 1

    async def _stream(self) -> AsyncIterator[bytes]:
        while not self._is_over():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    frame = await self._latest()
            except TimeoutError:
                frame = b": the engine is in a long step\n\n"
            except EngineStoppedError:
                break
            yield frame
            await asyncio.sleep(self._period_s)
        yield b"event: end\ndata: {}\n\n"

    async def _latest(self) -> bytes:
        async with self._lock:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._taken_s >= self._period_s * 0.9:
                document = await self._take()
                self._frame = f"event: kv\ndata: {dump_json(document)}\n\n".encode()
                self._taken_s = now_s
            return self._frame
