"""ReservedKVCache: one contiguous run of blocks per request, sized for the longest request there can be.

The baseline that paging is measured against: what engines did before block tables. A request takes a whole run when it
is admitted and gives it back when it ends; most of it is never written. Nothing is shared and nothing is cached, so a
fork starts from scratch and a preempted request computes everything again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.events import BlocksAllocated, BlocksReleased, EventLog
from octavo.core.kv_cache import GroupSpec, Match
from octavo.core.request import Request
from octavo.core.step import BlockCopy
from octavo.units import BlockId, RequestId, cdiv


class ReservedKVCache:
    """Implements `KVCache` with fixed runs.

    Args:
        num_blocks: Usable blocks of the pool; what is left after the last whole run stays unused.
        block_size: Tokens per block; runs are whole blocks, so that runners need to know nothing of this class.
        groups: KV groups; a run holds `max_model_len` tokens in each, windows or not.
        max_model_len: Most tokens of one request.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        max_model_len: int,
        events: EventLog,
    ) -> None:
        self._block_size = block_size
        self._num_groups = len(groups)
        self._num_usable_blocks = num_blocks
        self._blocks_per_group = cdiv(max_model_len, block_size)
        self._blocks_per_run = self._blocks_per_group * self._num_groups
        # A stack, so that the lowest run goes first.
        self._free_runs = list(range(num_blocks // self._blocks_per_run))[::-1]
        self._runs: dict[RequestId, int] = {}
        self._tables: dict[RequestId, tuple[array[int], ...]] = {}
        self._new_blocks: dict[RequestId, tuple[BlockId, ...]] = {}
        self._events = events

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_usable_blocks(self) -> int:
        return self._num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._num_usable_blocks - len(self._runs) * self._blocks_per_run

    @property
    def longest_tokens(self) -> int:
        has_a_run = self._num_usable_blocks >= self._blocks_per_run
        return self._blocks_per_group * self._block_size if has_a_run else 0

    def num_blocks(self, num_tokens: int) -> int:
        return self._blocks_per_run

    def match(self, request: Request) -> Match:
        return Match(blocks=((),) * self._num_groups)

    def can_admit(
        self, request: Request, match: Match, num_reserved_blocks: int, *, leaving: Request | None = None
    ) -> bool:
        return bool(self._free_runs) or leaving is not None

    def begin_step(self, step: int) -> None:
        pass  # nothing is ever evicted

    def admit(self, request: Request, match: Match) -> None:
        run = self._runs[request.request_id] = self._free_runs.pop()
        first = 1 + run * self._blocks_per_run
        starts = range(first, first + self._blocks_per_run, self._blocks_per_group)
        tables = tuple(array("i", range(start, start + self._blocks_per_group)) for start in starts)
        self._tables[request.request_id] = tables
        self._new_blocks[request.request_id] = tuple(BlockId(block_id) for table in tables for block_id in table)
        for group, table in enumerate(tables):
            block_ids = tuple(BlockId(block_id) for block_id in table)
            self._events.emit(BlocksAllocated(request_id=request.request_id, group=group, block_ids=block_ids))

    def grow(self, request: Request, start: int, stop: int) -> bool:
        assert stop <= self._blocks_per_group * self._block_size, "the request is longer than its run"
        return True

    def commit(self, request: Request) -> None:
        self._new_blocks.pop(request.request_id, None)

    def fork(self, parent: Request, child: Request) -> bool:
        return False

    def free(self, request: Request, *, keep_cached: bool) -> None:
        self._free_runs.append(self._runs.pop(request.request_id))
        self._new_blocks.pop(request.request_id, None)
        for group, table in enumerate(self._tables.pop(request.request_id)):
            block_ids = tuple(BlockId(block_id) for block_id in table)
            self._events.emit(BlocksReleased(request_id=request.request_id, group=group, block_ids=block_ids))

    def reset(self) -> bool:
        return not self._runs

    def tables(self, request: Request) -> Sequence[array[int]]:
        return self._tables[request.request_id]

    def step_copies(self, request: Request) -> Sequence[BlockCopy]:
        return ()

    def step_new_blocks(self, request: Request) -> Sequence[BlockId]:
        return self._new_blocks.get(request.request_id, ())

    def num_held_blocks(self, request: Request) -> int:
        return self._blocks_per_run

    def num_unfilled_source_places(self) -> int:
        return 0

    def block_map(self) -> bytes:
        places = bytearray(self._num_usable_blocks)
        for run in self._runs.values():
            first = run * self._blocks_per_run
            places[first : first + self._blocks_per_run] = b"\x02" * self._blocks_per_run
        return bytes(places)
