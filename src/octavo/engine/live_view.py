"""LiveView: the pool and its requests at one moment, and the minute before, as one JSON document.

What a page, a terminal and `GET /kv` show. Schema `octavo.kv/1`:

    schema, time_s              seconds of the engine's clock
    model, block_size_tokens, block_bytes, num_blocks, max_num_seqs
    blocks      first_id        id of the first block (1: the null block is left out)
                states          base64; two blocks per byte, the low half first:
                                0 empty (never used, or forgotten)     1 cached, held by nobody
                                2 held by one      3 shared      4 source of a copy in the last step
                num_holders     base64, packed alike: for each block in state 3, in order, its holders less 2;
                                15 means 17 or more
    requests[]  id, status (running, waiting, forking), wait_reason (seats, tokens, blocks, prefix; null if it runs or
                has not been looked at), num_prompt_tokens, num_output_tokens, num_computed_tokens, num_hit_tokens,
                num_preemptions, age_s,
                tables          per group a flat list of runs, each two numbers: first block id, length. A length of
                                +n counts up (7, 8, 9 is 7, 3), one of -n counts down (9, 8, 7 is 9, -3); id 0 stands
                                for n blocks out of a window. null if it was left out for the frame's size
                Running ones first, then those that waited longest; at most 256
    num_requests_left_out       how many more there are
    totals      num_running, num_waiting,
                referenced_blocks, cached_blocks, never_used_blocks (= num_blocks together), and the same three as
                _tokens (places) and _bytes; usage_ratio (referenced / all), fragmentation_ratio (empty places of
                referenced blocks / their places)
    rates       one value per second, oldest first, at most 60: time_s, output_tokens_per_s, prompt_tokens_per_s,
                hit_ratio (null in a second without lookups), preemptions_per_min, running, waiting, usage_ratio
    means       window_s, and over it: output_tokens_per_s, prompt_tokens_per_s, hit_ratio, preemptions_per_min
    latency     ttft_s, itl_s, e2e_s, queue_s: each p50, p90, p99 over the last minute; null without values
    advice[]    texts; empty when there is nothing to say

`freeze` copies what changes and belongs on the engine's thread; packing it (`LiveFrame.as_dict`) does not.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from octavo.core.block_pool import CACHED, EMPTY
from octavo.core.events import (
    BlockCopied,
    Event,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepScheduled,
)
from octavo.core.snapshot import RequestView, Snapshot
from octavo.engine.advice import PoolFacts, advise
from octavo.engine.held_blocks import HeldBlocks
from octavo.engine.metrics import RequestTimes
from octavo.engine.rolling_histogram import RollingHistogram
from octavo.engine.timeline import Second, Timeline
from octavo.units import RequestId

SCHEMA = "octavo.kv/1"
MAX_REQUESTS = 256
MAX_TABLE_RUNS = 5000
"""Runs of block ids in one frame, about 60 kB; tables beyond are left out."""
PERCENTS = (50, 90, 99)

_IN_USE, _SHARED, _COPIED = 2, 3, 4
_STATES = bytes([0, 1, _IN_USE, *[_SHARED] * 253])
_HOLDERS = bytes([0, 0, 0, *[min(count - 1 - 2, 15) for count in range(3, 256)]])
_UNSHARED = bytes([0, 1, 2])


class WatchedEngine(Protocol):
    """What is asked of the engine beside its events."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def request_times(self) -> Mapping[RequestId, RequestTimes]: ...

    def now_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFrame:
    """One moment, not packed yet. Everything in it is a copy."""

    model: str
    block_bytes: int
    facts: PoolFacts
    now_s: float
    snapshot: Snapshot
    copied: frozenset[int]
    arrivals_s: Mapping[RequestId, float]
    empty_ratio: float
    seconds: Sequence[Second]
    latency: Mapping[str, tuple[float | None, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return the document described above, JSON-ready."""
        snapshot = self.snapshot
        shown = _pick(snapshot.requests)
        return {
            "schema": SCHEMA,
            "time_s": round(self.now_s, 3),
            "model": self.model,
            "block_size_tokens": snapshot.block_size,
            "block_bytes": self.block_bytes,
            "num_blocks": snapshot.num_usable_blocks,
            "max_num_seqs": self.facts.max_num_seqs,
            "blocks": self._blocks(),
            "requests": self._requests(shown),
            "num_requests_left_out": len(snapshot.requests) - len(shown),
            "totals": self._totals(),
            "rates": self._rates(),
            "means": self._means(),
            "latency": {
                name: {f"p{percent}": _round(value) for percent, value in zip(PERCENTS, values, strict=True)}
                for name, values in self.latency.items()
            },
            "advice": list(advise(self.facts, self.seconds)),
        }

    def _blocks(self) -> dict[str, Any]:
        block_map = self.snapshot.block_map
        states = bytearray(block_map.translate(_STATES))
        for block_id in self.copied:
            states[block_id - 1] = _COPIED
        shared = bytes(block_map) if not self.copied else self._without_copied(block_map)
        return {
            "first_id": 1,
            "states": _pack(states),
            "num_holders": _pack(shared.translate(_HOLDERS, _UNSHARED)),
        }

    def _without_copied(self, block_map: bytes) -> bytes:
        kept = bytearray(block_map)
        for block_id in self.copied:
            kept[block_id - 1] = EMPTY
        return bytes(kept)

    def _requests(self, shown: Sequence[RequestView]) -> list[dict[str, Any]]:
        num_left = MAX_TABLE_RUNS
        requests = []
        for view in shown:
            tables: list[list[int]] | None = [_runs(table) for table in view.tables]
            num_runs = sum(len(table) // 2 for table in tables or ())
            num_left -= num_runs
            if num_left < 0:
                num_left, tables = num_left + num_runs, None
            requests.append(
                {
                    "id": view.request_id,
                    "status": view.status,
                    "wait_reason": view.wait_reason,
                    "num_prompt_tokens": view.num_prompt_tokens,
                    "num_output_tokens": view.num_output_tokens,
                    "num_computed_tokens": view.num_computed_tokens,
                    "num_hit_tokens": view.num_hit_tokens,
                    "num_preemptions": view.num_preemptions,
                    "age_s": round(self.now_s - self.arrivals_s.get(view.request_id, self.now_s), 3),
                    "tables": tables,
                }
            )
        return requests

    def _totals(self) -> dict[str, Any]:
        snapshot = self.snapshot
        num_cached, num_empty = snapshot.block_map.count(CACHED), snapshot.block_map.count(EMPTY)
        blocks = {
            "referenced": snapshot.num_usable_blocks - num_cached - num_empty,
            "cached": num_cached,
            "never_used": num_empty,
        }
        num_running = sum(bool(view.tables) for view in snapshot.requests)
        return {
            "num_running": num_running,
            "num_waiting": len(snapshot.requests) - num_running,
            **{f"{name}_blocks": count for name, count in blocks.items()},
            **{f"{name}_tokens": count * snapshot.block_size for name, count in blocks.items()},
            **{f"{name}_bytes": count * self.block_bytes for name, count in blocks.items()},
            "usage_ratio": round(blocks["referenced"] / snapshot.num_usable_blocks, 4),
            "fragmentation_ratio": round(self.empty_ratio, 4) if blocks["referenced"] else 0.0,
        }

    def _rates(self) -> dict[str, Any]:
        num_blocks = self.snapshot.num_usable_blocks
        return {
            "time_s": [second.second + 1 for second in self.seconds],
            "output_tokens_per_s": [second.num_output_tokens for second in self.seconds],
            "prompt_tokens_per_s": [second.num_prompt_tokens for second in self.seconds],
            "hit_ratio": [_ratio(second.num_hit_tokens, second.num_query_tokens) for second in self.seconds],
            "preemptions_per_min": [second.num_preemptions * 60 for second in self.seconds],
            "running": [second.num_running for second in self.seconds],
            "waiting": [second.num_waiting for second in self.seconds],
            "usage_ratio": [round(second.num_used_blocks / num_blocks, 4) for second in self.seconds],
        }

    def _means(self) -> dict[str, Any]:
        num_seconds = max(1, len(self.seconds))
        return {
            "window_s": len(self.seconds),
            "output_tokens_per_s": round(sum(each.num_output_tokens for each in self.seconds) / num_seconds, 2),
            "prompt_tokens_per_s": round(sum(each.num_prompt_tokens for each in self.seconds) / num_seconds, 2),
            "hit_ratio": _ratio(
                sum(each.num_hit_tokens for each in self.seconds), sum(each.num_query_tokens for each in self.seconds)
            ),
            "preemptions_per_min": round(60 * sum(each.num_preemptions for each in self.seconds) / num_seconds, 2),
        }


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
                case RequestArrived():
                    self._num_tokens_seen[event.request_id] = 0
                case RequestAdmitted():
                    self._take_admission(event, second, now_s)
                case RequestPreempted():
                    second.num_preemptions += event.reason == "blocks"
                    second.max_request_blocks = max(second.max_request_blocks, self._held.peak(event.request_id))
                case BlockCopied():
                    copied.append(event.source)
                case StepScheduled():
                    step = event
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
        num_seen, token_s = self._num_tokens_seen[request_id], times.token_s
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

    def _take_gauges(self, second: Second, step: StepScheduled | None) -> None:
        second.num_running, second.num_waiting = self._engine.num_running, self._engine.num_waiting
        second.max_wanting = max(second.max_wanting, second.num_running + second.num_waiting)
        if step is not None:
            second.max_wanting = max(second.max_wanting, step.num_running + step.num_waiting)
            second.num_used_blocks = step.num_usable_blocks - step.num_free_blocks
        if second.num_running == 0:
            second.num_used_blocks = 0


def _pick(views: Sequence[RequestView]) -> Sequence[RequestView]:
    """Return the requests that are shown: running ones, then the others in the order of their arrival."""
    return sorted(views, key=lambda view: not view.tables)[:MAX_REQUESTS]


def _pack(codes: bytes | bytearray) -> str:
    """Pack codes below 16, two per byte, the low half first. As two long numbers, so that no loop is in Python."""
    even = codes if len(codes) % 2 == 0 else codes + b"\0"
    low, high = int.from_bytes(even[0::2], "little"), int.from_bytes(even[1::2], "little")
    return b64encode((low | high << 4).to_bytes(len(even) // 2, "little")).decode("ascii")


def _runs(table: Sequence[int]) -> list[int]:
    """Return block ids as runs: first id and length, negative where ids fall; id 0 repeats."""
    runs: list[int] = []
    step = 0
    previous = -1
    for block_id in table:
        is_next = runs and (
            (block_id == previous == 0)
            or (previous > 0 < block_id and abs(block_id - previous) == 1 and step in (0, block_id - previous))
        )
        if is_next:
            step = block_id - previous
            runs[-1] = -abs(runs[-1]) - 1 if step < 0 else runs[-1] + 1
        else:
            runs += [block_id, 1]
            step = 0
        previous = block_id
    return runs


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
