"""EngineThread: the one thread that touches the engine, and the inbox through which all others speak to it.

    any thread                     engine thread, for ever
    submit, abort, post  ──▶  inbox  ──▶  commands, in order
                                          one step, if anything is unfinished
                              queues ◀──  what the step brought; each loop is woken once
                                          nothing left? sleep until the inbox rings

Commands run between steps, so an abort takes effect within one step, and what it frees is free for the next one.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from octavo.core.events import Event
from octavo.core.ports import Clock, Grammar
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest, OutputDelta
from octavo.engine.rates import RateWindow
from octavo.errors import EngineStoppedError, OctavoError, QueueFullError
from octavo.llm.health import Health
from octavo.llm.output_queue import Bell, OutputQueue

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine is given up."""
MAX_RETRY_AFTER_S = 60
DEFAULT_RETRY_AFTER_S = 5
"""Told when no request has ended in the last minute, so that nothing is known."""

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between two steps, or what to say if it can never be done."""

    run: Callable[[], None]
    drop: Callable[[EngineStoppedError], None]


class EngineThread:
    """Owns an engine from `start` on. Every public method may be called from any thread.

    Args:
        engine: Touched by nobody else from now on.
        max_waiting: Answers that may wait beyond the seats of a step (`max_num_seqs`).
        stall_s: Age of the last step, with work pending, from which the engine counts as stalled.
        clock: Tells ages and rates.
    """

    def __init__(self, engine: Engine, *, max_waiting: int, stall_s: float, clock: Clock) -> None:
        self._engine = engine
        self._max_open = engine.limits.max_num_seqs + max_waiting
        self._stall_s = stall_s
        self._clock = clock
        self._lock = threading.RLock()
        self._rung = threading.Condition(self._lock)
        self._inbox: deque[_Command] = deque()
        self._num_open = 0
        self._num_running = 0
        self._work_since_s: float | None = None
        self._is_draining = False
        self._is_over = False
        self._is_stopping = False
        self._failure: str | None = None
        self._idle_waiters: list[Future[None]] = []
        self._ends = RateWindow(now_s=clock.now_s())
        self._queues: dict[str, OutputQueue] = {}
        self._num_failed_steps = 0
        engine.subscribe(self._note_running)
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    # ---- any thread ----

    @property
    def health(self) -> Health:
        with self._lock:
            age_s = 0.0 if self._work_since_s is None else max(0.0, self._clock.now_s() - self._work_since_s)
            return Health(
                is_alive=self._thread.is_alive() and not self._is_over,
                is_stalled=age_s > self._stall_s,
                is_draining=self._is_draining,
                num_running=self._num_running,
                num_waiting=max(0, self._num_open - self._num_running),
                last_step_age_s=age_s,
                failure=self._failure,
            )

    def start(self) -> None:
        self._thread.start()

    def submit(self, message: EngineRequest, queue: OutputQueue, grammar: Grammar | None = None) -> None:
        """Hand a request over; whether the engine takes it, the queue will tell.

        Args:
            grammar: What `Engine.compile_grammar` made of its params.

        Raises:
            QueueFullError: too many wait.
            EngineStoppedError: nothing is taken any more.
        """
        num_answers = queue.num_unended
        with self._lock:
            self._check_open(is_request=True)
            # Alone, a request may have more answers than there are places: it could never be taken otherwise.
            if self._num_open and self._num_open + num_answers > self._max_open:
                raise self._queue_full(num_answers)
            self._num_open += num_answers

            def drop(error: EngineStoppedError) -> None:
                self._fail(queue, error)

            self._push(_Command(lambda: self._add(message, queue, grammar), drop))

    def leave(self, queue: OutputQueue) -> None:
        """End the request of a reader who has gone."""
        self._push(_Command(lambda: self._abort(queue), _ignore))

    def abort(self, request_id: str) -> None:
        """End a request by its id, if there is one; its reader gets the end, with the reason "abort"."""

        def run() -> None:
            queue = self._queues.get(request_id)
            if queue is not None:
                self._abort(queue)

        self._push(_Command(run, _ignore))

    def post(self, command: Callable[[], None]) -> None:
        """Run something between two steps. What it raises is fatal; never run if the engine has ended."""
        self._push(_Command(command, _ignore))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function between two steps; the future has its result, or what it raised.

        Raises:
            EngineStoppedError: nothing is run any more.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(self._engine)
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(result)

        def drop(error: EngineStoppedError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        with self._lock:
            self._check_open(is_request=False)
            self._push(_Command(run, drop))
        return future

    def drain(self) -> Future[None]:
        """Take no new requests; the future is done when none is left."""
        future: Future[None] = Future()
        with self._lock:
            self._is_draining = True
            is_idle = self._num_open == 0 or self._is_over
            if not is_idle:
                self._idle_waiters.append(future)
        if is_idle:
            future.set_result(None)
        return future

    def abort_all(self) -> None:
        """End every request that has been taken so far."""

        def run() -> None:
            for queue in list(self._queues.values()):
                self._abort(queue)

        self._push(_Command(run, _ignore))

    def stop(self, timeout_s: float) -> bool:
        """End every request and the thread; `False` if a step did not end in time, and the thread is left behind.

        Mutates: this thread for good; blocks until it is done.
        """
        with self._lock:
            self._is_stopping = self._is_draining = True
            self._rung.notify_all()
            has_started = self._thread.ident is not None
        if has_started:
            self._thread.join(timeout_s)
        self._close(_stopped())
        return not self._thread.is_alive()

    # ---- inbox ----

    def _push(self, command: _Command) -> None:
        with self._lock:
            if self._is_over:
                return
            self._inbox.append(command)
            if self._work_since_s is None:
                self._work_since_s = self._clock.now_s()
            self._rung.notify_all()

    def _check_open(self, *, is_request: bool) -> None:
        if self._is_over:
            raise _failed() if self._failure else _stopped()
        if is_request and self._is_draining:
            raise EngineStoppedError("the engine ends what it has and takes no new requests", because="it is draining")

    def _queue_full(self, num_answers: int) -> QueueFullError:
        num_waiting = max(0, self._num_open - self._num_running)
        rate = self._ends.per_s(self._clock.now_s())
        retry_after_s = math.ceil(num_waiting / rate) if rate else DEFAULT_RETRY_AFTER_S
        retry_after_s = min(max(1, retry_after_s), MAX_RETRY_AFTER_S)
        return QueueFullError(
            f"{num_waiting:,} answers wait and {self._num_running:,} are computed, {num_answers:,} more is too many",
            retry_after_s=retry_after_s,
            because=f"at most {self._max_open:,} are taken at a time",
            hints=(f"try again in {retry_after_s} s",),
        )

    def _wait_for_work(self) -> int:
        """Return how many commands there are; sleeps while there is nothing to do at all."""
        with self._lock:
            has_work = bool(self._inbox) or self._engine.has_unfinished
            self._work_since_s = self._clock.now_s() if has_work else None
            while not self._inbox and not self._is_stopping and not self._engine.has_unfinished:
                self._rung.wait()
            return len(self._inbox)

    def _next_command(self) -> _Command | None:
        """Take the oldest command; `None` if a stop that would not wait has dropped them all."""
        with self._lock:
            return self._inbox.popleft() if self._inbox else None

    # ---- engine thread ----

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not leave readers waiting
            self._die(error)

    def _turn(self) -> bool:
        """Do what was asked, then one step; `False` once the engine is to stop."""
        for _ in range(self._wait_for_work()):
            # One at a time: what follows a command that fails is still there to be dropped properly.
            command = self._next_command()
            if command is None:
                break
            command.run()
        if self._is_stopping:
            for queue in list(self._queues.values()):
                self._abort(queue)
            self._close(_stopped())
            return False
        if self._engine.has_unfinished:
            self._deliver(self._step())
        return True

    def _step(self) -> Sequence[OutputDelta]:
        try:
            deltas = self._engine.step()
        except Exception as error:
            self._num_failed_steps += 1
            if not self._engine.is_sound or self._num_failed_steps == MAX_FAILED_STEPS:
                raise
            _LOG.exception("A step failed, and its requests with it: %s", type(error).__name__)
            return self._engine.collect()
        self._num_failed_steps = 0
        return deltas

    def _add(self, message: EngineRequest, queue: OutputQueue, grammar: Grammar | None) -> None:
        try:
            self._engine.add(message, grammar)
        except OctavoError as refusal:
            self._fail(queue, refusal)
        except Exception as error:  # noqa: BLE001 - what is wrong with one request ends that one
            _LOG.exception("A request could not be taken: %s", type(error).__name__)
            self._fail(queue, error)
            if queue.request_id not in self._queues:
                self._engine.abort(queue.request_id)
                self._deliver(self._engine.collect())
        else:
            self._queues[queue.request_id] = queue
            queue.accept()
            self._ring([queue])

    def _abort(self, queue: OutputQueue) -> None:
        """End a request, unless its id belongs to another one by now."""
        if self._queues.get(queue.request_id) is queue:
            self._engine.abort(queue.request_id)
            # At once: the next command may give the id to another request, and these ends with it.
            self._deliver(self._engine.collect())

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        num_ended = 0
        touched: dict[OutputQueue, None] = {}
        for delta in deltas:
            queue = self._queues.get(delta.request_id)
            if queue is None:
                continue
            queue.put(delta)
            touched[queue] = None
            if delta.finish_reason is not None:
                num_ended += 1
                queue.num_unended -= 1
                if queue.num_unended == 0:
                    del self._queues[delta.request_id]
        # Counted before anybody is told, so that a reader of the last delta finds the books closed.
        self._note_ends(num_ended)
        self._ring(list(touched))

    def _ring(self, queues: Sequence[OutputQueue]) -> None:
        """Wake readers; those whose loop has been closed have left."""
        by_bell: dict[Bell, list[OutputQueue]] = {}
        for queue in queues:
            by_bell.setdefault(queue.bell, []).append(queue)
        for bell, rung in by_bell.items():
            if not bell.ring(rung):
                for queue in rung:
                    queue.leave()
                    self.leave(queue)

    def _note_running(self, _events: Sequence[Event]) -> None:
        """Called before a step is computed, too, so that a long first step does not look like waiting."""
        with self._lock:
            self._num_running = self._engine.num_running

    def _note_ends(self, num_ended: int) -> None:
        waiters: list[Future[None]] = []
        with self._lock:
            self._num_running = self._engine.num_running
            self._num_open -= num_ended
            self._ends.add(self._clock.now_s(), num_ended)
            if self._num_open == 0:
                waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _fail(self, queue: OutputQueue, error: Exception) -> None:
        """End a request with an error."""
        num_ended, queue.num_unended = queue.num_unended, 0
        queue.fail(error)
        self._note_ends(num_ended)
        self._ring([queue])

    # ---- the end ----

    def _die(self, error: BaseException) -> None:
        _LOG.critical("The engine has failed", exc_info=error)
        with self._lock:
            self._failure = f"{type(error).__name__}: {error}"
        if self._engine.is_sound:
            self._let_go()
        self._close(_failed())

    def _let_go(self) -> None:
        """Give back the blocks of all requests, so that what can still be looked at is right."""
        try:
            for request_id in list(self._queues):
                self._engine.abort(request_id)
        except Exception:  # noqa: BLE001 - the engine has failed as it is
            _LOG.exception("The engine could not let go of its requests")

    def _close(self, error: EngineStoppedError) -> None:
        """Tell everybody who still waits; nothing is taken from now on."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._work_since_s = None
            commands, queues = list(self._inbox), list(self._queues.values())
            self._inbox.clear()
            self._queues.clear()
        for queue in queues:
            self._fail(queue, _copy(error))
        for command in commands:
            command.drop(_copy(error))
        with self._lock:
            self._num_open = self._num_running = 0
            waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


def _ignore(_error: EngineStoppedError) -> None:
    """Drop a command that nobody waits for."""


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the engine has been stopped")


def _failed() -> EngineStoppedError:
    return EngineStoppedError("the engine has failed and takes no more requests", hints=("restart it",))


def _copy(error: EngineStoppedError) -> EngineStoppedError:
    """Return an equal error: one object raised for several readers would gather all their tracebacks."""
    return EngineStoppedError(error.message, because=error.because, hints=error.hints)
