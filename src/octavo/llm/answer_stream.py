"""AnswerStream: the reader's end of one request."""

from __future__ import annotations

import asyncio
import contextlib

from octavo.engine.messages import OutputDelta
from octavo.llm.engine_thread import EngineThread
from octavo.llm.output_queue import OutputQueue


class AnswerStream:
    """The deltas of one request that the engine has taken.

    Iterate over it, and `close` it, whether or not it has been read to its end: that ends the request. Waiting for a
    delta may be cancelled (by a timeout, say) and done again; nothing is lost and the request goes on.
    """

    def __init__(
        self, thread: EngineThread, queue: OutputQueue, loop: asyncio.AbstractEventLoop, *, num_answers: int
    ) -> None:
        self._thread = thread
        self._queue = queue
        self._loop = loop
        self._num_left = num_answers
        self._is_closed = False

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> OutputDelta:
        """Return what is new of one answer.

        Raises:
            EngineStoppedError: the engine was given up before the request was done.
            StopAsyncIteration: every answer has ended, or the stream was closed.
        """
        if self._num_left == 0 or self._is_closed:
            raise StopAsyncIteration
        delta = await self._queue.next()
        self._num_left -= delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """End the request if it is not done: within one step its blocks are free."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.leave()
        if self._num_left:
            self._thread.leave(self._queue)

    def __del__(self) -> None:
        if self._is_closed or not self._num_left:
            return
        # The collector runs anywhere, also while this very thread holds a lock; on the loop nothing is held.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._thread.leave, self._queue)
