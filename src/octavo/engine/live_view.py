"""LiveView: what happened to the pool and its requests in the last minute, as a fold over events.

`freeze` makes a `LiveFrame` of it and of a snapshot; its document is described there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from octavo.core.events import (
    BlockCopied,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    StepScheduled,
)
from octavo.core.snapshot import Snapshot
from octavo.engine.advice import PoolFacts
from octavo.engine.held_blocks import HeldBlocks
from octavo.engine.live_frame import PERCENTS, LiveFrame
from octavo.engine.metrics import RequestTimes
from octavo.engine.rolling_histogram import RollingHistogram
from octavo.engine.timeline import Second, Timeline
from octavo.units import RequestId


class WatchedEngine(Protocol):
    """What is asked of the engine beside its events."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def request_times(self) -> Mapping[RequestId, RequestTimes]: ...

    def now_s(self) -> float: ...


class LiveView:
    """Folds an engine's events into what a `LiveFrame` needs.

    `listen` and `freeze` are for the engine's thread.

    Args:
        engine: Being watched; subscribe `listen` to it.
        model: Its model's name.
        block_bytes: Size of one block.
        facts: What advice is about.
    """

    def __init__(self, engine: WatchedEngine, *, model: str, block_bytes: int, facts: PoolFacts) -> None:
        self._engine = engine
        self._model = model
        self._block_bytes = block_bytes
        self._facts = facts
        self._held = HeldBlocks()
        self._timeline = Timeline(engine.now_s())
        self._latency = {name: RollingHistogram() for name in ("ttft_s", "itl_s", "e2e_s", "queue_s")}
        self._num_tokens_seen: dict[RequestId, int] = {}
        self._copied: frozenset[int] = frozenset()
        self._empty_ratio = 0.0
        self._num_computing = 0

    def listen(self, events: Sequence[Event]) -> None:
        """Take in the events of a step or an arrival."""
        now_s = self._engine.now_s()
        second = self._timeline.at(now_s)
        step: StepScheduled | None = None
        copied: list[int] = []
        num_following = 0
        for event in events:
            if isinstance(event, RequestFinished):
                num_following += self._take_end(event, second, now_s)
            self._held.take(event)
            match event:
                case RequestForked():
                    self._num_tokens_seen[event.request_id] = 0
                case RequestAdmitted():
                    # Not on arrival: a long queue would be gone through in every step.
                    self._num_tokens_seen.setdefault(event.request_id, 0)
                    self._take_admission(event, second, now_s)
                case RequestPreempted():
                    second.num_preemptions += event.reason == "blocks"
                    second.max_request_blocks = max(second.max_request_blocks, self._held.peak(event.request_id))
                case BlockCopied():
                    copied.append(event.source)
                case StepScheduled():
                    step = event
                    self._take_sharing(event, second)
                case _:
                    pass
        # A step's tokens come with the call after the one that tells of the step.
        num_following += self._take_tokens(second, now_s)
        second.num_prompt_tokens += max(0, self._num_computing - num_following)
        self._num_computing = 0
        if step is not None:
            self._copied = frozenset(copied)
            self._take_step(step)
        self._take_gauges(second, step)

    def freeze(self, snapshot: Snapshot) -> LiveFrame:
        """Copy what a document needs. Cost: O(requests)."""
        now_s = self._engine.now_s()
        times = self._engine.request_times
        views = snapshot.requests
        return LiveFrame(
            model=self._model,
            block_bytes=self._block_bytes,
            facts=self._facts,
            now_s=now_s,
            snapshot=snapshot,
            copied=self._copied,
            arrivals_s={
                view.request_id: times[view.request_id].arrival_s for view in views if view.request_id in times
            },
            empty_ratio=self._empty_ratio,
            seconds=self._timeline.complete(now_s),
            latency={name: each.percentiles(now_s, PERCENTS) for name, each in self._latency.items()},
        )

    def take(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the document of this moment."""
        return self.freeze(snapshot).as_dict()

    # ---- parts of listen ----

    def _take_admission(self, event: RequestAdmitted, second: Second, now_s: float) -> None:
        if event.is_resumed:
            return
        second.num_query_tokens += event.num_known_tokens
        second.num_hit_tokens += event.num_block_hit_tokens + event.num_copied_hit_tokens
        times = self._engine.request_times.get(event.request_id)
        if times is not None and times.admitted_s is not None:
            self._latency["queue_s"].add(now_s, times.admitted_s - times.arrival_s)

    def _take_tokens(self, second: Second, now_s: float) -> int:
        """Count the tokens that came since the last call; return how many followed another of their request."""
        num_following = 0
        for request_id, num_seen in self._num_tokens_seen.items():
            times = self._engine.request_times.get(request_id)
            if times is not None and len(times.token_s) > num_seen:
                num_following += self._take_tokens_of(request_id, times, second, now_s)
        return num_following

    def _take_tokens_of(self, request_id: RequestId, times: RequestTimes, second: Second, now_s: float) -> int:
        # An answer of one token may end before it was ever forked or admitted, when all seats are taken.
        num_seen, token_s = self._num_tokens_seen.get(request_id, 0), times.token_s
        self._num_tokens_seen[request_id] = len(token_s)
        if num_seen == 0:
            self._latency["ttft_s"].add(now_s, token_s[0] - times.arrival_s)
        gaps = [after - before for before, after in pairwise(token_s[max(0, num_seen - 1) :])]
        for gap_s in gaps:
            self._latency["itl_s"].add(now_s, gap_s)
        second.num_output_tokens += len(token_s) - num_seen
        return len(gaps)

    def _take_end(self, event: RequestFinished, second: Second, now_s: float) -> int:
        num_following = 0
        times = self._engine.request_times.get(event.request_id)
        if times is not None:
            if len(times.token_s) > self._num_tokens_seen.get(event.request_id, 0):
                num_following = self._take_tokens_of(event.request_id, times, second, now_s)
            if times.e2e_s is not None:
                self._latency["e2e_s"].add(now_s, times.e2e_s)
        self._num_tokens_seen.pop(event.request_id, None)
        second.max_request_blocks = max(second.max_request_blocks, self._held.peak(event.request_id))
        return num_following

    def _take_step(self, step: StepScheduled) -> None:
        self._num_computing = step.num_tokens
        num_places = (step.num_usable_blocks - step.num_free_blocks) * self._facts.block_size
        self._empty_ratio = 1 - step.num_filled_places / num_places if num_places else 0.0

    def _take_sharing(self, step: StepScheduled, second: Second) -> None:
        # Both ends of a copy are referenced until it has been made, and one of them is in no table.
        num_used_blocks = step.num_usable_blocks - step.num_free_blocks
        second.num_shared_holds += max(0, self._held.num_held - num_used_blocks)
        second.num_further_runs += max(0, step.num_running - 1)

    def _take_gauges(self, second: Second, step: StepScheduled | None) -> None:
        second.num_running, second.num_waiting = self._engine.num_running, self._engine.num_waiting
        second.max_wanting = max(second.max_wanting, second.num_running + second.num_waiting)
        if step is not None:
            second.max_wanting = max(second.max_wanting, step.num_running + step.num_waiting)
            second.num_used_blocks = step.num_usable_blocks - step.num_free_blocks
        if second.num_running == 0:
            second.num_used_blocks = 0
