"""Explain: why one request took what it took, as a fold over events.

Schema `octavo.explain/1`, one document per request:

    schema, request_id, status (waiting, running, finished), finish_reason
    num_prompt_tokens, num_output_tokens, max_total_tokens, priority
    hits            num_block_tokens, num_copied_tokens, num_missed_tokens: what the first lookup found of the prompt
                    block_ids: per group, the blocks hit, from the first token on (0: not needed, out of a window)
                    copied_from: blocks of which the first tokens were copied
    near_miss       position of the first token at which the nearest cached text differs, its block_id, and, for those
                    who may see them, token_id and cached_token_id; null if nothing began alike
    waits[]         reason and seconds; "arrival" is the time until it was first looked at, "preempted" the time after
                    each preemption until it was looked at again
    preemptions[]   at_s (since arrival), reason, for_request_id (its own, where its next token found no block
                    and it was the last in rank), num_blocks given back, num_computed_tokens then, and
                    num_recomputed_tokens: what was computed again, null until it is known; the first 100
    num_preemptions, num_recomputed_tokens, num_copies (all copy-on-write and copied hits), peak_blocks
    num_steps       how many steps there were while it ran
    mean_others_running     how many other requests ran in them, on average; null before the first
    times           seconds: queue_s, ttft_s, prefill_s, decode_s, e2e_s; null where it did not come to that
    further_answers[]   the same for answers 1, 2, ... of `n`, which are requests of their own

Finished requests are kept until so many others have finished.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from octavo.core.events import (
    BlockCopied,
    Event,
    FinishReason,
    PreemptReason,
    PrefixDiverged,
    RequestAdmitted,
    RequestArrived,
    RequestDelayed,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    StepScheduled,
)
from octavo.engine.held_blocks import HeldBlocks
from octavo.engine.metrics import RequestTimes
from octavo.units import BlockId, RequestId, TokenId

SCHEMA = "octavo.explain/1"
MAX_FINISHED = 1000
MAX_PREEMPTIONS = 100

Status = Literal["waiting", "running", "finished"]


class TimedEngine(Protocol):
    """What is asked of the engine beside its events."""

    @property
    def request_times(self) -> Mapping[RequestId, RequestTimes]: ...

    def now_s(self) -> float: ...


@dataclass(slots=True, kw_only=True)
class Preemption:
    """One time a request gave its blocks back; `num_recomputed_tokens` is known when it runs again."""

    at_s: float
    reason: PreemptReason
    for_request_id: RequestId
    num_blocks: int
    num_computed_tokens: int
    num_recomputed_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """Where the nearest cached text left the prompt."""

    position: int
    block_id: BlockId
    token_id: TokenId
    cached_token_id: TokenId


@dataclass(slots=True, kw_only=True)
class Explanation:
    """All that is known of one request; fields as in the schema above, times by the engine's clock.

    A copy: it does not change while it is read.
    """

    request_id: RequestId
    num_prompt_tokens: int
    max_total_tokens: int
    priority: int
    arrival_s: float
    asked_s: float
    status: Status = "waiting"
    finish_reason: FinishReason | None = None
    num_output_tokens: int = 0
    num_block_hit_tokens: int | None = None
    num_copied_hit_tokens: int = 0
    hit_block_ids: tuple[array[int], ...] = ()
    copied_from: list[BlockId] = field(default_factory=list)
    near_miss: NearMiss | None = None
    waits_s: dict[str, float] = field(default_factory=dict)
    wait_reason: str | None = "arrival"
    wait_since_s: float = 0.0
    preemptions: list[Preemption] = field(default_factory=list)
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_lost_tokens: int | None = None
    num_copies: int = 0
    peak_blocks: int = 0
    num_steps: int = 0
    num_others_running: int = 0
    """Summed over the steps."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    further_answers: tuple[Explanation, ...] = ()

    def as_dict(self, *, shows_tokens: bool = False) -> dict[str, Any]:
        """Return the document; token ids only for those who may see the prompt."""
        return {
            "schema": SCHEMA,
            "request_id": self.request_id,
            "status": self.status,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "max_total_tokens": self.max_total_tokens,
            "priority": self.priority,
            "hits": self._hits(),
            "near_miss": self._near_miss(shows_tokens=shows_tokens),
            "waits": [{"reason": reason, "seconds": round(s, 6)} for reason, s in self._waits().items()],
            "preemptions": [self._preemption(each) for each in self.preemptions],
            "num_preemptions": self.num_preemptions,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "num_copies": self.num_copies,
            "peak_blocks": self.peak_blocks,
            "num_steps": self.num_steps,
            "mean_others_running": round(self.num_others_running / self.num_steps, 3) if self.num_steps else None,
            "times": self._times(),
            "further_answers": [each.as_dict(shows_tokens=shows_tokens) for each in self.further_answers],
        }

    def _hits(self) -> dict[str, Any] | None:
        if self.num_block_hit_tokens is None:
            return None
        return {
            "num_block_tokens": self.num_block_hit_tokens,
            "num_copied_tokens": self.num_copied_hit_tokens,
            "num_missed_tokens": self.num_prompt_tokens - self.num_block_hit_tokens - self.num_copied_hit_tokens,
            "block_ids": [list(block_ids) for block_ids in self.hit_block_ids],
            "copied_from": list(self.copied_from),
        }

    def _near_miss(self, *, shows_tokens: bool) -> dict[str, Any] | None:
        if self.near_miss is None:
            return None
        place = {"position": self.near_miss.position, "block_id": self.near_miss.block_id}
        if not shows_tokens:
            return place
        return {**place, "token_id": self.near_miss.token_id, "cached_token_id": self.near_miss.cached_token_id}

    def _waits(self) -> Mapping[str, float]:
        waits = dict(self.waits_s)
        if self.wait_reason is not None:
            waits[self.wait_reason] = waits.get(self.wait_reason, 0.0) + self.asked_s - self.wait_since_s
        return waits

    def _preemption(self, each: Preemption) -> dict[str, Any]:
        return {
            "at_s": round(each.at_s - self.arrival_s, 6),
            "reason": each.reason,
            "for_request_id": each.for_request_id,
            "num_blocks": each.num_blocks,
            "num_computed_tokens": each.num_computed_tokens,
            "num_recomputed_tokens": each.num_recomputed_tokens,
        }

    def _times(self) -> dict[str, float | None]:
        return {
            "queue_s": _gap(self.arrival_s, self.admitted_s),
            "ttft_s": _gap(self.arrival_s, self.first_token_s),
            "prefill_s": _gap(self.admitted_s, self.first_token_s),
            "decode_s": _gap(self.first_token_s, self.last_token_s),
            "e2e_s": _gap(self.arrival_s, self.finished_s),
        }


class ExplainLog:
    """Keeps an explanation of every unfinished request and of the last finished ones.

    `listen` belongs on the engine's thread; `find` may be called from any.

    Args:
        engine: Tells the times; subscribe `listen` to it.
        max_finished: Finished requests kept.
    """

    def __init__(self, engine: TimedEngine, *, max_finished: int = MAX_FINISHED) -> None:
        self._engine = engine
        self._max_finished = max_finished
        self._lock = threading.Lock()
        self._held = HeldBlocks()
        self._unfinished: dict[RequestId, Explanation] = {}
        self._running: dict[RequestId, Explanation] = {}
        self._finished: OrderedDict[RequestId, Explanation] = OrderedDict()

    def __len__(self) -> int:
        """Return how many requests are kept, unfinished ones included."""
        return len(self._unfinished) + len(self._finished)

    def find(self, request_id: str) -> Explanation | None:
        """Return what is known of a request, by the id its front end gave it; the latest, if it had several."""
        with self._lock:
            single = self._copy(request_id)
            if single is not None:
                return single
            answers: list[Explanation] = []
            while (answer := self._copy(f"{request_id}/{len(answers)}")) is not None:
                answers.append(answer)
        return replace(answers[0], further_answers=tuple(answers[1:])) if answers else None

    def listen(self, events: Sequence[Event]) -> None:
        """Take in the events of a step or an arrival."""
        now_s = self._engine.now_s()
        with self._lock:
            for event in events:
                request = self._unfinished.get(getattr(event, "request_id", RequestId("")))
                if request is not None:
                    self._take(event, request, now_s)
                    self._note_running(request)
                elif isinstance(event, RequestArrived):
                    self._arrive(event, now_s)
                self._held.take(event)
                if isinstance(event, StepScheduled):
                    self._count_step(event)
                if isinstance(event, RequestFinished) and request is not None:
                    self._file(request)
                elif request is not None:
                    request.peak_blocks = self._held.peak(request.request_id)

    # ---- one kind of event each ----

    def _arrive(self, event: RequestArrived, now_s: float) -> None:
        self._unfinished[event.request_id] = Explanation(
            request_id=event.request_id,
            num_prompt_tokens=event.num_prompt_tokens,
            max_total_tokens=event.max_total_tokens,
            priority=event.priority,
            arrival_s=now_s,
            asked_s=now_s,
            wait_since_s=now_s,
        )

    def _take(self, event: Event, request: Explanation, now_s: float) -> None:
        match event:
            case RequestDelayed():
                _wait(request, event.reason, now_s)
            case RequestAdmitted():
                self._admit(event, request, now_s)
            case RequestForked():
                _run(request, now_s)
                request.num_block_hit_tokens = event.num_shared_tokens
            case PrefixDiverged():
                # What a resumed request nearly misses is its own text.
                if request.num_preemptions == 0 and request.near_miss is None:
                    request.near_miss = NearMiss(
                        position=event.position,
                        block_id=event.block_id,
                        token_id=event.token_id,
                        cached_token_id=event.cached_token_id,
                    )
            case BlockCopied():
                request.num_copies += 1
                if request.num_block_hit_tokens is None:
                    request.copied_from.append(event.source)
            case RequestPreempted():
                _preempt(event, request, now_s)
            case RequestFinished():
                self._finish(event, request, now_s)
            case _:
                pass

    @staticmethod
    def _admit(event: RequestAdmitted, request: Explanation, now_s: float) -> None:
        _run(request, now_s)
        num_hits = event.num_block_hit_tokens + event.num_copied_hit_tokens
        if request.num_lost_tokens is not None:
            num_recomputed = max(0, request.num_lost_tokens - num_hits)
            request.num_recomputed_tokens += num_recomputed
            request.num_lost_tokens = None
            if request.num_preemptions == len(request.preemptions):
                request.preemptions[-1].num_recomputed_tokens = num_recomputed
        if request.num_block_hit_tokens is None:
            request.num_block_hit_tokens = event.num_block_hit_tokens
            request.num_copied_hit_tokens = event.num_copied_hit_tokens
            request.hit_block_ids = tuple(array("i", block_ids) for block_ids in event.hit_block_ids)

    def _finish(self, event: RequestFinished, request: Explanation, now_s: float) -> None:
        _stop_waiting(request, now_s)
        request.status = "finished"
        request.finish_reason = event.reason
        request.finished_s = request.asked_s = now_s
        self._note_tokens(request)
        request.num_output_tokens = event.num_output_tokens

    def _count_step(self, event: StepScheduled) -> None:
        for request in self._running.values():
            request.num_steps += 1
            request.num_others_running += event.num_running - 1

    def _note_running(self, request: Explanation) -> None:
        """Know who runs, so that a step does not go through a long queue."""
        if request.status == "running":
            self._running[request.request_id] = request
        else:
            self._running.pop(request.request_id, None)

    def _file(self, request: Explanation) -> None:
        del self._unfinished[request.request_id]
        self._finished.pop(request.request_id, None)
        self._finished[request.request_id] = request
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    # ---- answers to questions ----

    def _copy(self, request_id: str) -> Explanation | None:
        key = RequestId(request_id)
        request = self._unfinished.get(key)
        if request is None:
            found = self._finished.get(key)
            return None if found is None else deepcopy(found)
        self._note_tokens(request)
        return replace(deepcopy(request), asked_s=self._engine.now_s())

    def _note_tokens(self, request: Explanation) -> None:
        """Copy the few times that are told; a list of all of them would be kept for every finished request."""
        times = self._engine.request_times.get(request.request_id)
        if times is not None and times.token_s:
            request.num_output_tokens = len(times.token_s)
            request.first_token_s, request.last_token_s = times.token_s[0], times.token_s[-1]


def _wait(request: Explanation, reason: str, now_s: float) -> None:
    _stop_waiting(request, now_s)
    request.wait_reason, request.wait_since_s = reason, now_s


def _stop_waiting(request: Explanation, now_s: float) -> None:
    if request.wait_reason is not None:
        waited_s = request.waits_s.get(request.wait_reason, 0.0)
        request.waits_s[request.wait_reason] = waited_s + now_s - request.wait_since_s
        request.wait_reason = None


def _run(request: Explanation, now_s: float) -> None:
    _stop_waiting(request, now_s)
    request.status = "running"
    if request.admitted_s is None:
        request.admitted_s = now_s


def _preempt(event: RequestPreempted, request: Explanation, now_s: float) -> None:
    request.status = "waiting"
    request.num_preemptions += 1
    request.num_lost_tokens = event.num_computed_tokens
    if len(request.preemptions) < MAX_PREEMPTIONS:
        request.preemptions.append(
            Preemption(
                at_s=now_s,
                reason=event.reason,
                for_request_id=event.for_request_id,
                num_blocks=event.num_blocks,
                num_computed_tokens=event.num_computed_tokens,
            )
        )
    _wait(request, "preempted", now_s)


def _gap(start_s: float | None, stop_s: float | None) -> float | None:
    return None if start_s is None or stop_s is None else round(stop_s - start_s, 6)
