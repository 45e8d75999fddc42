"""OutputQueue: what the engine thread has for one request, until its reader on an event loop takes it.

    engine thread                                   event loop
    put, accept, fail  ──▶  one delta per answer  ──▶  accepted, next
    one bell per loop, rung once per step     ──▶      readers wake

A reader that keeps up sees the delta of every step. One that does not finds a single delta per answer in which the
missed ones are joined, so that a slow reader holds no more than its own answer and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection

from octavo.core.events import FinishReason
from octavo.core.step import TokenLogprobs
from octavo.engine.messages import OutputDelta
from octavo.units import TokenId


class Bell:
    """Wakes readers of one event loop from another thread: at most one callback waits there, however slow it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._due: set[OutputQueue] = set()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def ring(self, queues: Collection[OutputQueue]) -> bool:
        """Wake the readers of these queues; `False` if their loop has been closed and nobody reads any more."""
        with self._lock:
            is_scheduled = bool(self._due)
            self._due.update(queues)
            if not is_scheduled and self._due:
                try:
                    self._loop.call_soon_threadsafe(self._wake)
                except RuntimeError:
                    self._due.clear()
                    return False
        return not self.is_closed

    def _wake(self) -> None:
        with self._lock:
            due, self._due = self._due, set()
        for queue in due:
            queue.wake()


class OutputQueue:
    """Deltas of one request on their way to one reader.

    `put`, `accept` and `fail` are for the engine thread, which rings the bell afterwards; everything else is for the
    loop that made the queue.

    Args:
        request_id: Of the request.
        num_answers: How many answers will end.
        bell: Of the reader's loop.
    """

    def __init__(self, request_id: str, num_answers: int, bell: Bell) -> None:
        self.request_id = request_id
        self.bell = bell
        self.num_unended = num_answers
        """Answers that have not ended on the engine's side; for the engine thread."""
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._joined: dict[int, _Joined] = {}
        self._error: BaseException | None = None
        self._is_accepted = False
        self._is_left = False

    # ---- engine thread ----

    def accept(self) -> None:
        """Say that the request waits or runs."""
        self._is_accepted = True

    def put(self, delta: OutputDelta) -> None:
        """Add what a step brought; dropped if nobody reads any more."""
        with self._lock:
            if self._is_left:
                return
            joined = self._joined.get(delta.index)
            if joined is None:
                self._joined[delta.index] = _Joined(delta)
            else:
                joined.add(delta)

    def fail(self, error: BaseException) -> None:
        """End the request with an error, which the reader gets after what is here already."""
        with self._lock:
            if self._error is None:
                self._error = error

    # ---- event loop ----

    async def accepted(self) -> None:
        """Wait until the engine has taken the request.

        Raises:
            BaseException: it was refused.
        """
        while True:
            self._event.clear()
            if self._error is not None:
                raise self._error
            if self._is_accepted:
                return
            await self._event.wait()

    async def next(self) -> OutputDelta:
        """Wait for the next delta. Cancelling the wait loses nothing.

        Raises:
            BaseException: the request failed, and everything before has been read.
        """
        while True:
            self._event.clear()
            delta = self._take()
            if delta is not None:
                return delta
            await self._event.wait()

    def leave(self) -> None:
        """Stop reading: what is here is dropped, and what comes is not kept."""
        with self._lock:
            self._is_left = True
            self._joined.clear()

    def wake(self) -> None:
        self._event.set()

    def _take(self) -> OutputDelta | None:
        with self._lock:
            if self._joined:
                # Answers take turns: the one whose news is oldest.
                index = next(iter(self._joined))
                return self._joined.pop(index).as_delta()
            if self._error is not None:
                raise self._error
            return None


class _Joined:
    """Deltas of one answer, joined; adding costs O(delta), whatever is there already."""

    __slots__ = ("_finish_reason", "_first", "_is_single", "_logprobs", "_prompt_logprobs", "_stop_reason", "_text",
                 "_token_ids")  # fmt: skip

    def __init__(self, first: OutputDelta) -> None:
        self._first = first
        self._is_single = True

    def add(self, delta: OutputDelta) -> None:
        if self._is_single:
            first = self._first
            self._is_single = False
            self._text: list[str] = [first.text]
            self._token_ids: list[TokenId] = list(first.token_ids)
            self._logprobs: list[TokenLogprobs] = list(first.logprobs)
            self._prompt_logprobs: list[TokenLogprobs] = list(first.prompt_logprobs)
            self._finish_reason: FinishReason | None = first.finish_reason
            self._stop_reason: str | int | None = first.stop_reason
        assert self._finish_reason is None, "a delta came after the end of its answer"
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs.extend(delta.prompt_logprobs)
        self._finish_reason = delta.finish_reason
        self._stop_reason = delta.stop_reason

    def as_delta(self) -> OutputDelta:
        if self._is_single:
            return self._first
        return OutputDelta(
            request_id=self._first.request_id,
            index=self._first.index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_cached_tokens=self._first.num_cached_tokens,
        )
