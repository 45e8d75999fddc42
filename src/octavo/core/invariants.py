"""Invariants: what is true of a pool, its tables and its scheduler between any two calls.

Written as functions that assert, called by tests after every step, by `--debug`, and by the simulator now and then.
They look inside on purpose; nothing else does.
"""

from __future__ import annotations

from collections import Counter

from octavo.core.block import Block
from octavo.core.kv_cache import KVCache
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.request import RequestStatus
from octavo.core.reserved_kv_cache import ReservedKVCache
from octavo.core.scheduler import Scheduler
from octavo.core.step import NULL_BLOCK, StepPlan
from octavo.units import cdiv


def check_scheduler(scheduler: Scheduler) -> None:
    """Check a scheduler and its allocator. Cost: O(blocks + requests)."""
    running = {request.request_id for request in scheduler.running}
    counts = Counter(request.status for request in scheduler.requests)
    assert counts[RequestStatus.FINISHED] == 0, "a finished request is still listed"
    assert counts[RequestStatus.RUNNING] == len(running) == scheduler.num_running
    assert counts[RequestStatus.WAITING] == scheduler.num_waiting, "a request is lost, or waits twice"
    num_forks = sum(len(request.forks) for request in scheduler.requests)
    assert counts[RequestStatus.FORKING] == num_forks, "an answer waits for a prompt that nobody computes for it"
    assert len(running) <= scheduler.limits.max_num_seqs
    for request in scheduler.requests:
        assert (request.status is RequestStatus.RUNNING) == (request.request_id in running)
        assert 0 <= request.num_computed_tokens < max(1, request.num_known_tokens)
        assert request.num_known_tokens <= request.max_total_tokens or request.params.max_tokens == 0
        assert request.status is RequestStatus.RUNNING or request.num_computed_tokens == 0
        if request.num_hit_tokens is not None:
            assert 0 <= request.num_hit_tokens < request.max_total_tokens
        for fork in request.forks:
            assert fork.status is RequestStatus.FORKING
    if isinstance(scheduler.kv_cache, PagedKVCache):
        check_paged(scheduler.kv_cache, scheduler)
    if isinstance(scheduler.kv_cache, ReservedKVCache):
        _check_reserved(scheduler.kv_cache, scheduler)


def check_paged(kv_cache: PagedKVCache, scheduler: Scheduler) -> None:
    """Check the pool, its free queue, its indexes and every table against each other."""
    pool = kv_cache.pool
    free_ids = [block.id for block in pool.free_blocks]
    assert len(set(free_ids)) == len(free_ids) == pool.num_free_blocks, "the free queue lists a block twice"
    held = Counter[int]()
    for request in scheduler.running:
        for table in kv_cache.tables(request):
            held.update(block_id for block_id in table if block_id != NULL_BLOCK)
        held.update(copy.source for copy in kv_cache.step_copies(request))
    for block in pool.blocks[1:]:
        assert block.ref_count == held[block.id], f"{block} is in {held[block.id]} tables"
    assert pool.block_map() == bytes(map(_map_byte, pool.blocks[1:])), "the map of the blocks is behind"
    assert set(free_ids) == {block.id for block in pool.blocks[1:] if block.ref_count == 0}
    assert len(free_ids) + sum(block.ref_count > 0 for block in pool.blocks[1:]) == pool.num_usable_blocks
    null = pool.blocks[NULL_BLOCK]
    assert null.ref_count == 0 and null.key is None and null.id not in free_ids, "the null block is in use"
    _check_index(kv_cache)
    _check_tables(kv_cache, scheduler)


def _map_byte(block: Block) -> int:
    return min(block.ref_count + 1, 255) if block.ref_count else int(block.key is not None)


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """Check a plan that is in flight."""
    assert plan.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert plan.num_requests <= scheduler.limits.max_num_seqs
    assert len(set(plan.request_ids)) == plan.num_requests
    sources = {copy.source for copy in plan.copies}
    destinations = [copy.destination for copy in plan.copies]
    assert len(set(destinations)) == len(destinations) and sources.isdisjoint(destinations)
    assert len(set(plan.new_blocks)) == len(plan.new_blocks), "a block is handed out twice in a step"
    assert set(destinations) <= set(plan.new_blocks) and sources.isdisjoint(plan.new_blocks)
    assert list(plan.selected_rows) == sorted(set(plan.selected_rows))
    kv_cache = scheduler.kv_cache
    for index, request_id in enumerate(plan.request_ids):
        start = plan.start_positions[index]
        stop = start + plan.query_offsets[index + 1] - plan.query_offsets[index]
        assert stop > start, f"{request_id} is scheduled for nothing"
        for group in plan.tables:
            table = group.block_ids[group.offsets[index] : group.offsets[index + 1]]
            assert len(table) >= cdiv(stop, kv_cache.block_size), "a token has no place"
            written = table[start // kv_cache.block_size : cdiv(stop, kv_cache.block_size)]
            assert NULL_BLOCK not in written
            if isinstance(kv_cache, PagedKVCache):
                for block_id in written:
                    block = kv_cache.pool.blocks[block_id]
                    num_waiting_copies = sum(copy.source == block_id for copy in plan.copies)
                    assert block.key is None, f"{request_id} writes into cached {block}"
                    assert block.ref_count - num_waiting_copies == 1, f"{request_id} writes into shared {block}"


def _check_index(kv_cache: PagedKVCache) -> None:
    pool = kv_cache.pool
    indexed: set[int] = set()
    for group, index in enumerate(pool.indexes):
        for block in index.blocks():
            assert block.key is not None and block.group == group
            assert block.id not in indexed, f"{block} is indexed twice"
            assert 0 < block.num_keyed_tokens <= kv_cache.block_size
            if block.num_keyed_tokens == kv_cache.block_size:
                assert index.find(block.key) is block, f"{block} cannot be found by its key"
            indexed.add(block.id)
    keyed = {block.id for block in pool.blocks if block.key is not None}
    assert keyed == indexed, "a block has a key but is not indexed, or the reverse"


def _check_tables(kv_cache: PagedKVCache, scheduler: Scheduler) -> None:
    block_size = kv_cache.block_size
    for request in scheduler.running:
        num_promised = kv_cache.num_blocks(request.num_known_tokens)
        assert kv_cache.num_held_blocks(request) <= num_promised, f"{request.request_id} holds more than was promised"
        for group, table in enumerate(kv_cache.tables(request)):
            live = [block_id for block_id in table if block_id != NULL_BLOCK]
            assert len(set(live)) == len(live), f"{request.request_id} lists a block twice"
            assert len(table) >= cdiv(request.num_computed_tokens, block_size)
            spec = kv_cache.groups[group]
            places = [index for index, block_id in enumerate(table) if block_id == NULL_BLOCK]
            first = spec.num_sink_blocks(block_size)
            assert places == list(range(first, first + len(places))), "null blocks lie between sinks and window"
            hidden = spec.hidden_blocks(request.num_computed_tokens, block_size)
            assert len(places) <= len(hidden), f"{request.request_id} lacks a block that it can see"
            for index, block_id in enumerate(table):
                block = kv_cache.pool.blocks[block_id]
                if block.key is not None:
                    _check_names(block, request.content.identity(index * block_size, (index + 1) * block_size), group)


def _check_names(block: Block, identity: bytes, group: int) -> None:
    assert block.key is not None
    assert block.group == group
    assert block.key.tokens == identity, f"{block} is named after other tokens than it holds"


def _check_reserved(kv_cache: ReservedKVCache, scheduler: Scheduler) -> None:
    seen: set[int] = set()
    for request in scheduler.running:
        for table in kv_cache.tables(request):
            assert list(table) == list(range(table[0], table[0] + len(table))), "a run is contiguous"
            assert seen.isdisjoint(table), "two requests share a run"
            seen.update(table)
    assert kv_cache.num_free_blocks == kv_cache.num_usable_blocks - len(seen)


def check_idle(kv_cache: KVCache) -> None:
    """Check that nothing is held once all requests have ended."""
    assert kv_cache.num_free_blocks == kv_cache.num_usable_blocks, "blocks leaked"
