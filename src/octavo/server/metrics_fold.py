"""MetricsFold: what an engine did since it started, as counts and histograms folded from its events.

Fed on the engine thread after every step and arrival; read by whoever answers a scrape. Everything is bounded: fixed
labels, and per-request state only while the request is unfinished. Gauges come from arrivals and ends rather than from
the last step, so that they are 0 when nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from octavo.core.events import (
    BlockCopied,
    BlockEvicted,
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
    RequestRejected,
    StepScheduled,
    WaitReason,
)
from octavo.engine.metrics import RequestTimes
from octavo.server.histogram import Histogram
from octavo.units import RequestId

NOT_YET_TRIED = "arrival"
PREEMPTED = "preempted"
WAIT_REASONS: tuple[str, ...] = (NOT_YET_TRIED, *get_args(WaitReason), PREEMPTED)
REJECT_REASONS = ("too_long", "queue_full", "stopping")

TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
IDLE_STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
FIRST_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
WHOLE_S = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
)


@dataclass(slots=True, kw_only=True)
class _Unfinished:
    """What has been counted of a request that has not ended; `wait_reason` is `None` while it runs."""

    wait_reason: str | None = NOT_YET_TRIED
    num_known_tokens: int = 0
    num_tokens_seen: int = 0
    lost: tuple[PreemptReason, int] | None = None


class MetricsFold:
    """Counts of one engine; `take` is its only writer.

    Dicts have all their keys from the start, so that a reader on another thread never meets one that grows.
    """

    def __init__(self) -> None:
        self.num_waiting = dict.fromkeys(WAIT_REASONS, 0)
        self.num_finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.num_rejected = dict.fromkeys(REJECT_REASONS, 0)
        self.num_steps = 0
        self.num_query_tokens = 0
        self.num_block_hit_tokens = 0
        self.num_copied_hit_tokens = 0
        self.num_near_misses = 0
        self.num_near_miss_tokens = 0
        self.num_computed_tokens = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_copies = 0
        self.num_preemptions: dict[PreemptReason, int] = dict.fromkeys(get_args(PreemptReason), 0)
        self.num_recomputed_tokens: dict[PreemptReason, int] = dict.fromkeys(get_args(PreemptReason), 0)
        self.empty_ratio = 0.0
        self.step_tokens = Histogram(STEP_TOKENS)
        self.eviction_idle_steps = Histogram(IDLE_STEPS)
        self.ttft_s = Histogram(FIRST_S)
        self.inter_token_s = Histogram(GAPS_S)
        self.queue_s = Histogram(WHOLE_S)
        self.prefill_s = Histogram(WHOLE_S)
        self.decode_s = Histogram(WHOLE_S)
        self.inference_s = Histogram(WHOLE_S)
        self.e2e_s = Histogram(WHOLE_S)
        self.mean_inter_token_s = Histogram(GAPS_S)
        self.request_prompt_tokens = Histogram(TOKEN_COUNTS)
        self.request_output_tokens = Histogram(TOKEN_COUNTS)
        self._unfinished: dict[RequestId, _Unfinished] = {}
        self._running: dict[RequestId, _Unfinished] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def take(self, events: Sequence[Event], times: Mapping[RequestId, RequestTimes], *, block_size: int) -> None:
        """Fold events, and the times of the requests that they and the last step concern.

        Args:
            times: The engine's own, which already know these events; read here, never kept.
            block_size: Places in a block.
        """
        for event in events:
            match event:
                case RequestFinished():
                    self._take_end(event, times.get(event.request_id))
                case StepScheduled():
                    self._take_step(event, block_size)
                case BlockCopied():
                    self.num_copies += 1
                case BlockEvicted():
                    self.eviction_idle_steps.observe(event.idle_steps)
                case _:
                    self._take_request_event(event)
        # Running ones only: thousands may wait, and this is done twice a step.
        for request_id, running in self._running.items():
            if request_id in times:
                self._take_tokens(running, times[request_id])

    def reject(self, reason: str) -> None:
        """Count a request that the engine never saw; `reason` is one of `REJECT_REASONS`."""
        self.num_rejected[reason] += 1

    # ---- waiting and running ----

    def _take_request_event(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._unfinished[event.request_id] = _Unfinished()
                self.num_waiting[NOT_YET_TRIED] += 1
            case RequestRejected():
                self.num_rejected["too_long"] += 1
            case RequestDelayed():
                self._wait(event.request_id, event.reason)
            case RequestAdmitted():
                self._take_admission(event)
            case RequestForked():
                self._run(event.request_id)
            case PrefixDiverged():
                self._take_near_miss(event)
            case RequestPreempted():
                self._take_preemption(event)
            case _:
                pass

    def _wait(self, request_id: RequestId, reason: str) -> None:
        unfinished = self._unfinished[request_id]
        self._leave(request_id, unfinished)
        unfinished.wait_reason = reason
        self.num_waiting[reason] += 1

    def _run(self, request_id: RequestId) -> None:
        unfinished = self._running[request_id] = self._unfinished[request_id]
        assert unfinished.wait_reason is not None, "it runs already"
        self.num_waiting[unfinished.wait_reason] -= 1
        unfinished.wait_reason = None

    def _leave(self, request_id: RequestId, unfinished: _Unfinished) -> None:
        if unfinished.wait_reason is None:
            del self._running[request_id]
        else:
            self.num_waiting[unfinished.wait_reason] -= 1

    # ---- one kind of event each ----

    def _take_admission(self, event: RequestAdmitted) -> None:
        self._run(event.request_id)
        unfinished = self._unfinished[event.request_id]
        unfinished.num_known_tokens = event.num_known_tokens
        num_hits = event.num_block_hit_tokens + event.num_copied_hit_tokens
        if unfinished.lost is not None:
            reason, num_lost = unfinished.lost
            self.num_recomputed_tokens[reason] += max(0, num_lost - num_hits)
            unfinished.lost = None
        if event.is_resumed:
            # Its prompt was counted before; what it finds of its own blocks again is no hit that a caller gained.
            return
        self.num_query_tokens += event.num_known_tokens
        self.num_block_hit_tokens += event.num_block_hit_tokens
        self.num_copied_hit_tokens += event.num_copied_hit_tokens
        self.num_prompt_tokens += event.num_known_tokens
        self.request_prompt_tokens.observe(event.num_known_tokens)

    def _take_near_miss(self, event: PrefixDiverged) -> None:
        self.num_near_misses += 1
        self.num_near_miss_tokens += self._unfinished[event.request_id].num_known_tokens - event.position

    def _take_preemption(self, event: RequestPreempted) -> None:
        self.num_preemptions[event.reason] += 1
        self._wait(event.request_id, PREEMPTED)
        self._unfinished[event.request_id].lost = (event.reason, event.num_computed_tokens)

    def _take_step(self, event: StepScheduled, block_size: int) -> None:
        self.num_steps += 1
        self.num_computed_tokens += event.num_tokens
        self.step_tokens.observe(event.num_tokens)
        num_places = (event.num_usable_blocks - event.num_free_blocks) * block_size
        self.empty_ratio = 1 - event.num_filled_places / num_places if num_places else 0.0

    def _take_tokens(self, unfinished: _Unfinished, times: RequestTimes) -> None:
        first, token_s = unfinished.num_tokens_seen, times.token_s
        for index in range(first, len(token_s)):
            if index == 0:
                self.ttft_s.observe(token_s[0] - times.arrival_s)
            else:
                self.inter_token_s.observe(token_s[index] - token_s[index - 1])
        self.num_output_tokens += len(token_s) - first
        unfinished.num_tokens_seen = len(token_s)

    def _take_end(self, event: RequestFinished, times: RequestTimes | None) -> None:
        unfinished = self._unfinished.pop(event.request_id)
        if times is not None:
            self._take_tokens(unfinished, times)
            self._take_times(times)
        self._leave(event.request_id, unfinished)
        self.num_finished[event.reason] += 1
        self.request_output_tokens.observe(event.num_output_tokens)
        if not self._unfinished:
            self.empty_ratio = 0.0

    def _take_times(self, times: RequestTimes) -> None:
        if times.e2e_s is not None:
            self.e2e_s.observe(times.e2e_s)
        if times.admitted_s is None:
            return
        # A further answer has its first token from its fellow's prompt, and may wait for a seat only then.
        admitted_s = min([times.admitted_s, *times.token_s[:1]])
        self.queue_s.observe(admitted_s - times.arrival_s)
        if not times.token_s:
            return
        first_s, last_s = times.token_s[0], times.token_s[-1]
        self.prefill_s.observe(first_s - admitted_s)
        self.decode_s.observe(last_s - first_s)
        self.inference_s.observe(last_s - admitted_s)
        if len(times.token_s) > 1:
            self.mean_inter_token_s.observe((last_s - first_s) / (len(times.token_s) - 1))
