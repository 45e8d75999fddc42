"""Ledger: an account of what requests were promised and what they got, kept apart from the scheduler's own books.

It reads only what the scheduler says to the outside (events, plans, updates) and compares it with what must be true of
any correct scheduler: chunks follow each other without gap or overlap, tokens are delivered once and in order, every
arrival ends exactly once, nobody overtakes without a reason, and each answer is the one the request gets alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from octavo.core.events import (
    BlockCached,
    BlockCopied,
    BlockEvicted,
    BlocksAllocated,
    Event,
    PrefixCacheReset,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    RequestRejected,
    StepScheduled,
)
from octavo.core.kv_cache import KVCache
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.request import Request, RequestStatus
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan
from octavo.core.updates import RequestUpdate
from octavo.testing.factories import CoreSetup, solo_output
from octavo.units import BlockId, RequestId


class Ledger:
    """Follows one scheduler from its first event.

    Args:
        setup: Of the scheduler; decides what a request answers alone.
    """

    def __init__(self, setup: CoreSetup) -> None:
        self._setup = setup
        self.requests: dict[RequestId, Request] = {}
        self.finished: dict[RequestId, RequestFinished] = {}
        self._root_hashes: set[str] = set()
        self._tokens: dict[RequestId, list[int]] = defaultdict(list)
        self._scores: dict[RequestId, list[int]] = defaultdict(list)
        self._positions: dict[RequestId, int] = {}
        self._admitted: set[RequestId] = set()
        self._admitted_now: list[RequestId] = []
        self._announced: set[str] = set()
        self._cached: dict[BlockId, str] = {}
        self._has_preempted_for_blocks = False

    # ---- what is told ----

    def accept(self, answers: Iterable[Request]) -> None:
        for request in answers:
            self.requests[request.request_id] = request
            self._root_hashes.add(request.root.hash.hex())

    def read_events(self, events: Iterable[Event]) -> None:
        """Take in events in order."""
        for event in events:
            if isinstance(event, BlockCached | BlockEvicted | BlocksAllocated | BlockCopied | PrefixCacheReset):
                self._read_block_event(event)
            elif isinstance(event, RequestArrived):
                assert event.request_id not in self.finished, f"{event.request_id} arrives after its end"
            elif isinstance(event, RequestRejected):
                assert event.request_id not in self.requests
            elif isinstance(event, RequestAdmitted):
                self._read_admitted(event)
            elif isinstance(event, RequestForked):
                self._admitted.add(event.request_id)
                self._positions[event.request_id] = event.num_shared_tokens
            elif isinstance(event, RequestPreempted):
                assert event.num_computed_tokens == self._positions.pop(event.request_id)
                self._has_preempted_for_blocks |= event.reason == "blocks"
            elif isinstance(event, StepScheduled):
                assert 0 <= event.num_free_blocks <= event.num_usable_blocks == self._setup.num_blocks
                num_used = event.num_usable_blocks - event.num_free_blocks
                assert 0 <= event.num_filled_places <= num_used * self._setup.block_size
                self._has_preempted_for_blocks = False
            elif isinstance(event, RequestFinished):
                assert event.request_id in self.requests and event.request_id not in self.finished
                self.finished[event.request_id] = event
                self._positions.pop(event.request_id, None)

    def read_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Check a plan that is in flight against what has been computed before."""
        running = {request.request_id for request in scheduler.running}
        assert set(plan.request_ids) == running, "a running request got no token in a step"
        stops = {}
        for index, request_id in enumerate(plan.request_ids):
            start = plan.start_positions[index]
            stops[request_id] = start + plan.query_offsets[index + 1] - plan.query_offsets[index]
            assert start == self._positions[request_id], f"{request_id} skips or repeats tokens"
            request = self.requests[request_id]
            rows = plan.token_ids[plan.query_offsets[index] : plan.query_offsets[index + 1]]
            assert rows == request.content.token_ids(start, stops[request_id])
        sampled = {row.request_id for row in plan.samples}
        for request_id, stop in stops.items():
            request = self.requests[request_id]
            is_caught_up = stop == request.num_known_tokens and request.params.max_tokens != 0
            assert (request_id in sampled) == is_caught_up, f"{request_id} is sampled too early or too late"
            for fork in request.forks:
                assert (fork.request_id in sampled) == is_caught_up
        self._check_order(scheduler)

    def read_commit(self, plan: StepPlan, updates: Iterable[RequestUpdate]) -> None:
        """Take in what a committed step delivered."""
        for index, request_id in enumerate(plan.request_ids):
            if request_id in self._positions:
                self._positions[request_id] += plan.query_offsets[index + 1] - plan.query_offsets[index]
        for update in updates:
            if update.token_id is not None:
                self._tokens[update.request_id].append(update.token_id)
            self._scores[update.request_id].extend(score.token_id for score in update.prompt_logprobs)
            if update.finish_reason is not None:
                assert self.finished[update.request_id].reason == update.finish_reason
        for rows in plan.prompt_logprobs:
            prompt = list(self.requests[rows.request_id].prompt_token_ids())
            scored = self._scores[rows.request_id]
            assert scored == prompt[1 : len(scored) + 1], f"{rows.request_id} scores its prompt out of order"

    # ---- what must be true in the end ----

    def check_end(self, scheduler: Scheduler, *, ended_early: set[RequestId]) -> None:
        """Check that every request has ended once, with the answer it would have had alone."""
        assert set(self.finished) == set(self.requests), "a request never ended"
        for request_id, request in self.requests.items():
            expected, reason = solo_output(request, self._setup)
            got = list(request.output_token_ids())
            finished = self.finished[request_id]
            assert finished.num_output_tokens == len(got)
            assert self._tokens[request_id] == got, f"{request_id} was told other tokens than it holds"
            if request_id in ended_early:
                assert got == expected[: len(got)], f"{request_id} differs from the run alone"
                continue
            assert got == expected, f"{request_id} differs from the run alone"
            assert finished.reason == request.finish_reason == reason
        cached = _cached_hashes(scheduler.kv_cache)
        assert self._cached == cached, "the events tell of other cached blocks than there are"

    # ---- parts ----

    def _read_admitted(self, event: RequestAdmitted) -> None:
        assert not self._has_preempted_for_blocks, "admitted in a step that ran out of blocks"
        num_hit = event.num_block_hit_tokens + event.num_copied_hit_tokens
        assert 0 <= num_hit < event.num_known_tokens, "a hit covers the last token"
        assert event.num_block_hit_tokens % self._setup.block_size == 0
        assert event.num_copied_hit_tokens < self._setup.block_size
        request = self.requests[event.request_id]
        if not self._setup.is_caching or request.params.prompt_logprobs is not None:
            assert num_hit == 0, "a request that must not read the cache has hits"
        assert event.is_resumed or event.request_id not in self._admitted
        assert event.request_id not in self._positions, f"{event.request_id} is admitted twice"
        if not event.is_resumed:
            self._admitted_now.append(event.request_id)
        self._admitted.add(event.request_id)
        self._positions[event.request_id] = num_hit

    def _read_block_event(
        self, event: BlockCached | BlockEvicted | BlocksAllocated | BlockCopied | PrefixCacheReset
    ) -> None:
        if isinstance(event, BlockCached):
            assert self._setup.is_caching
            assert event.parent_hash in self._announced | self._root_hashes, "a child is announced before its parent"
            assert event.block_id not in self._cached
            self._announced.add(event.hash)
            self._cached[event.block_id] = event.hash
        elif isinstance(event, BlockEvicted):
            assert self._cached.pop(event.block_id) == event.hash
            assert event.idle_steps >= 0
        elif isinstance(event, BlocksAllocated):
            assert self._cached.keys().isdisjoint(event.block_ids), "a block handed out is still announced as cached"
        elif isinstance(event, BlockCopied):
            assert event.destination not in self._cached and event.source != event.destination
        else:
            assert not self._cached, "a reset leaves cached blocks"

    def _check_order(self, scheduler: Scheduler) -> None:
        """Check that nobody who waits was overtaken, unless it waits for its own prefix to be computed."""
        is_by_priority = self._setup.policy == "priority"

        def rank(request: Request) -> tuple[int, int]:
            return request.priority if is_by_priority else 0, request.arrival

        newcomers = [self.requests[request_id] for request_id in self._admitted_now]
        self._admitted_now.clear()
        for waiting in scheduler.requests if newcomers else ():
            if waiting.status is RequestStatus.WAITING and waiting.wait_reason != "prefix":
                for request in newcomers:
                    assert rank(request) < rank(waiting), f"{request} overtook {waiting}"


def _cached_hashes(kv_cache: KVCache) -> dict[BlockId, str]:
    if not isinstance(kv_cache, PagedKVCache):
        return {}
    return {block.id: block.key.hash.hex() for block in kv_cache.pool.blocks if block.key is not None}
