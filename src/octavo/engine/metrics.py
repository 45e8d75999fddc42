"""Metrics: what a run did and how long its requests took, as a fold over events and tokens.

Nothing here is read back by the scheduler. Times come from the engine's clock, so a simulation yields the same figures
in virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.events import (
    BlockCopied,
    BlockEvicted,
    Event,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepScheduled,
)
from octavo.units import RequestId


class Spread(NamedTuple):
    """Mean and percentiles of a set of values; all `None` where there are no values."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """When things happened to one request, in seconds of the engine's clock."""

    arrival_s: float
    admitted_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: arrival until the first output token is there."""
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.finished_s - self.arrival_s if self.finished_s is not None else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive output tokens."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]


class Metrics:
    """Counts and times of one engine. `take` folds events, `take_token` notes an output token.

    `runner_s` is the time spent executing plans, added up by the engine.

    Args:
        keeps_finished: Whether the times of finished requests stay, as a run that is measured wants. Otherwise they
            are there for whoever hears of the end, and gone with the next events: an engine that runs for months does
            not grow.
    """

    def __init__(self, *, block_size: int, keeps_finished: bool = True) -> None:
        self._block_size = block_size
        self._keeps_finished = keeps_finished
        self._just_finished: list[RequestId] = []
        self.runner_s = 0.0
        self.times: dict[RequestId, RequestTimes] = {}
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_hit_tokens = 0
        self.num_copies = 0
        self.num_evictions = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.max_running = 0
        self._sum_running = 0
        self._peak_usage_ratio = 0.0
        self._sum_used_places = 0
        self._sum_filled_places = 0
        self._preempted_tokens: dict[RequestId, int] = {}

    @property
    def mean_running(self) -> float:
        return self._sum_running / self.num_steps if self.num_steps else 0.0

    @property
    def peak_kv_usage_ratio(self) -> float:
        """Largest share of usable blocks held at the end of scheduling a step."""
        return self._peak_usage_ratio

    @property
    def kv_token_utilization_ratio(self) -> float:
        """Token places of held blocks that were filled, over all steps: 1 minus the share of memory wasted."""
        return self._sum_filled_places / self._sum_used_places if self._sum_used_places else 0.0

    def take(self, events: Sequence[Event], now_s: float) -> None:
        """Fold events that became known at `now_s`."""
        for request_id in self._just_finished:
            del self.times[request_id]
        self._just_finished.clear()
        for event in events:
            match event:
                case RequestArrived():
                    self.times[event.request_id] = RequestTimes(arrival_s=now_s)
                case RequestAdmitted():
                    self._take_admission(event, now_s)
                case RequestPreempted():
                    self.num_preemptions += 1
                    self._preempted_tokens[event.request_id] = event.num_computed_tokens
                case RequestFinished():
                    self.times[event.request_id].finished_s = now_s
                    self.num_prompt_tokens += event.num_prompt_tokens
                    self.num_output_tokens += event.num_output_tokens
                    self.num_hit_tokens += event.num_hit_tokens
                    self._preempted_tokens.pop(event.request_id, None)
                    if not self._keeps_finished:
                        self._just_finished.append(event.request_id)
                case StepScheduled():
                    self._take_step(event)
                case BlockCopied():
                    self.num_copies += 1
                case BlockEvicted():
                    self.num_evictions += 1
                case _:
                    pass

    def take_token(self, request_id: RequestId, now_s: float) -> None:
        """Note that an output token became known."""
        self.times[request_id].token_s.append(now_s)

    def _take_admission(self, event: RequestAdmitted, now_s: float) -> None:
        times = self.times[event.request_id]
        if times.admitted_s is None:
            times.admitted_s = now_s
        lost = self._preempted_tokens.pop(event.request_id, None)
        if lost is not None:
            self.num_recomputed_tokens += max(0, lost - event.num_block_hit_tokens - event.num_copied_hit_tokens)

    def _take_step(self, event: StepScheduled) -> None:
        used = event.num_usable_blocks - event.num_free_blocks
        self.num_steps += 1
        self.num_computed_tokens += event.num_tokens
        self.max_running = max(self.max_running, event.num_running)
        self._sum_running += event.num_running
        self._peak_usage_ratio = max(self._peak_usage_ratio, used / event.num_usable_blocks)
        self._sum_used_places += used * self._block_size
        self._sum_filled_places += event.num_filled_places


def spread(values: Sequence[float]) -> Spread:
    """Return mean and percentiles; a percentile is the smallest value that so many percent do not exceed."""
    if not values:
        return Spread(None, None, None, None)
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

    return Spread(sum(ordered) / len(ordered), percentile(50), percentile(90), percentile(99))
