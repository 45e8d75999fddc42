"""PagedKVCache: block tables that grow with their request and share what is equal.

    token positions      0 .. 15   16 .. 31   32 .. 40
    block table          [ 7 ]     [ 3 ]      [ 9 ]          one entry per 16 tokens, any block of the pool
                         full      full       partial: 9 of 16 places filled, the only block the request writes to

Full blocks are named when they have been computed and shared from then on; the partial one is private, or shared after
a fork until somebody writes (copy-on-write). Tables are append-only while the request runs: a duplicate that turns up
later is not merged, so no runner ever sees an entry change under it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from octavo.core.block import Block, BlockHash, BlockKey
from octavo.core.block_hash import HashFunction, chain_hash, child_key
from octavo.core.block_pool import BlockPool
from octavo.core.content import token_at
from octavo.core.events import BlockCopied, BlocksAllocated, BlocksReleased, EventLog
from octavo.core.kv_cache import Divergence, GroupSpec, Match
from octavo.core.request import Request
from octavo.core.step import NULL_BLOCK, BlockCopy
from octavo.units import BlockId, RequestId, cdiv


class _Holding:
    """What one running request holds.

    `num_named[g]` counts leading blocks already offered to the prefix cache, `num_dropped[g]` blocks given back because
    they left the window; they follow the blocks of the sinks without a gap. `copies` are this step's (source,
    destination); the reference on a source is this holding's until the step is committed.
    """

    __slots__ = ("copies", "new_blocks", "num_dropped", "num_named", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables = [array("i") for _ in range(num_groups)]
        self.num_named = [0] * num_groups
        self.num_dropped = [0] * num_groups
        self.copies: list[BlockCopy] = []
        self.new_blocks: list[BlockId] = []


class PagedKVCache:
    """Implements `KVCache` with blocks from one pool for all groups.

    Args:
        num_blocks: Usable blocks of the pool.
        block_size: Tokens per block.
        groups: How each KV group keeps tokens.
        max_chunk_tokens: Most tokens of one request in one step; bounds what a window group holds.
        is_caching: Whether blocks are named and found again.
        hash_function: Tests pass weak ones.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        max_chunk_tokens: int,
        is_caching: bool = True,
        events: EventLog,
        hash_function: HashFunction = chain_hash,
    ) -> None:
        self._pool = BlockPool(num_blocks, num_groups=len(groups), events=events)
        self._block_size = block_size
        self._groups = tuple(groups)
        self._max_chunk_tokens = max_chunk_tokens
        self._is_caching = is_caching
        self._events = events
        self._hash_function = hash_function
        self._holdings: dict[RequestId, _Holding] = {}
        self._in_flight: dict[BlockHash, RequestId] = {}
        self._num_copies_from: Counter[BlockId] = Counter()
        self._longest_tokens = self._find_longest()

    # ---- questions ----

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def longest_tokens(self) -> int:
        return self._longest_tokens

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """How each group keeps tokens."""
        return self._groups

    @property
    def pool(self) -> BlockPool:
        """The pool underneath; for reading only."""
        return self._pool

    def num_blocks(self, num_tokens: int) -> int:
        return sum(group.num_blocks(num_tokens, self._block_size, self._max_chunk_tokens) for group in self._groups)

    def tables(self, request: Request) -> Sequence[array[int]]:
        return self._holdings[request.request_id].tables

    def step_copies(self, request: Request) -> Sequence[BlockCopy]:
        return self._holdings[request.request_id].copies

    def step_new_blocks(self, request: Request) -> Sequence[BlockId]:
        return self._holdings[request.request_id].new_blocks

    def num_held_blocks(self, request: Request) -> int:
        holding = self._holdings[request.request_id]
        return sum(map(len, holding.tables)) - sum(holding.num_dropped)

    def num_unfilled_source_places(self) -> int:
        sources = [(self._pool.blocks[block_id], count) for block_id, count in self._num_copies_from.items()]
        return sum(
            self._block_size - block.num_keyed_tokens
            for block, count in sources
            if block.ref_count == count and block.key is not None
        )

    def block_map(self) -> bytes:
        return self._pool.block_map()

    def match(self, request: Request) -> Match:
        if not self._is_caching or not request.reads_prefix_cache:
            return Match(blocks=((),) * len(self._groups))
        # The last known token is always left to compute: its logits choose the next one.
        limit = request.num_known_tokens - 1
        num_blocks = self._match_blocks(request, limit // self._block_size)
        blocks = tuple(self._hit_blocks(request, group, num_blocks) for group in range(len(self._groups)))
        start = num_blocks * self._block_size
        stop = min(start + self._block_size, limit)
        sources, run, divergence = self._match_tokens(request, start, stop)
        is_next_in_flight = start + self._block_size <= limit and self._key(request, num_blocks).hash in self._in_flight
        return Match(
            blocks=blocks,
            num_block_tokens=start,
            sources=sources,
            num_copied_tokens=run,
            is_next_block_in_flight=is_next_in_flight,
            divergence=divergence,
        )

    def can_admit(
        self, request: Request, match: Match, num_reserved_blocks: int, *, leaving: Request | None = None
    ) -> bool:
        num_known = request.num_known_tokens
        first_stop = min(num_known, match.num_tokens + self._max_chunk_tokens)
        num_new = 0
        for group, hits in zip(self._groups, match.blocks, strict=True):
            num_hits = sum(block is not None for block in hits)
            num_held = group.num_blocks(num_known, self._block_size, self._max_chunk_tokens)
            # A copied hit can move the window past a block hit before it; if others hold that one, nothing comes free
            # for it, and the first chunk needs all its blocks on top.
            num_new += max(num_held - num_hits, cdiv(first_stop, self._block_size) - len(hits))
        freed = self._held_alone(leaving) if leaving is not None else frozenset()
        # A hit on a block that nobody holds takes it out of the free queue: it is not free for anything else. The same
        # block may be source and hit of different groups, hence the set.
        hit_blocks = [block for hits in match.blocks for block in hits if block is not None]
        taken = {block.id for block in (*hit_blocks, *match.sources) if block.ref_count == 0 or block.id in freed}
        return num_new + len(taken) + num_reserved_blocks <= self._pool.num_free_blocks + len(freed)

    # ---- commands ----

    def begin_step(self, step: int) -> None:
        self._pool.set_step(step)

    def admit(self, request: Request, match: Match) -> None:
        holding = self._holdings[request.request_id] = _Holding(len(self._groups))
        # All hits are touched before anything is allocated: allocation evicts, and must not evict them.
        for group, hits in enumerate(match.blocks):
            for block in hits:
                if block is None:
                    holding.num_dropped[group] += 1
                    holding.tables[group].append(NULL_BLOCK)
                else:
                    self._pool.touch(block)
                    holding.tables[group].append(block.id)
            holding.num_named[group] = len(hits)
        for source in match.sources:
            self._pool.touch(source)
        if match.sources:
            copies = self._pool.allocate(len(match.sources))
            assert copies is not None, "can_admit counted the copies"
            for group, (source, copy) in enumerate(zip(match.sources, copies, strict=True)):
                holding.tables[group].append(copy.id)
                self._record_copy(request, holding, source, copy)
        if self._is_caching:
            for index in range(match.num_block_tokens // self._block_size, len(request.content) // self._block_size):
                self._in_flight.setdefault(self._key(request, index).hash, request.request_id)

    def grow(self, request: Request, start: int, stop: int) -> bool:
        holding = self._holdings[request.request_id]
        self._drop_out_of_window(request, holding)
        first = start // self._block_size
        num_missing = [cdiv(stop, self._block_size) - len(table) for table in holding.tables]
        shared = [
            (group, block)
            for group, table in enumerate(holding.tables)
            if first < len(table) and self._is_shared(block := self._pool.blocks[table[first]])
        ]
        blocks = self._pool.allocate(sum(num_missing) + len(shared))
        if blocks is None:
            return False
        taken = iter(blocks)
        for group, source in shared:
            copy = next(taken)
            holding.tables[group][first] = copy.id
            # The reference this request had on the source stays until the copy has been made.
            self._record_copy(request, holding, source, copy)
        for group, count in enumerate(num_missing):
            if count:
                block_ids = tuple(block.id for block in islice(taken, count))
                holding.tables[group].extend(block_ids)
                holding.new_blocks.extend(block_ids)
                self._events.emit(BlocksAllocated(request_id=request.request_id, group=group, block_ids=block_ids))
        return True

    def commit(self, request: Request) -> None:
        holding = self._holdings[request.request_id]
        self._finish_copies(holding)
        holding.new_blocks.clear()
        if not self._is_caching:
            return
        num_full = request.num_computed_tokens // self._block_size
        for group, table in enumerate(holding.tables):
            for index in range(holding.num_named[group], num_full):
                block = self._pool.blocks[table[index]]
                key = self._key(request, index)
                self._pool.cache(block, key, group=group, num_tokens=self._block_size, is_full=True)
            first, holding.num_named[group] = holding.num_named[group], num_full
            self._land(request, first, num_full)

    def fork(self, parent: Request, child: Request) -> bool:
        source = self._holdings[parent.request_id]
        assert not source.copies, "a fork sees committed blocks only"
        holding = self._holdings[child.request_id] = _Holding(len(self._groups))
        for group, table in enumerate(source.tables):
            holding.tables[group].extend(table)
            for index in self._held_places(source, group):
                self._pool.touch(self._pool.blocks[table[index]])
        holding.num_named = list(source.num_named)
        holding.num_dropped = list(source.num_dropped)
        child.keys = list(parent.keys)
        return True

    def free(self, request: Request, *, keep_cached: bool) -> None:
        holding = self._holdings.pop(request.request_id)
        if self._is_caching and keep_cached:
            self._cache_tail(request, holding)
        self._land(request, 0, len(request.keys))
        # Tail first over all groups at once: a hit needs all groups, so the deepest blocks of each go first.
        places = [(index, group) for group in range(len(self._groups)) for index in self._held_places(holding, group)]
        for index, group in sorted(places, reverse=True):
            self._pool.release(self._pool.blocks[holding.tables[group][index]])
        for group, table in enumerate(holding.tables):
            block_ids = tuple(BlockId(table[index]) for index in reversed(self._held_places(holding, group)))
            self._events.emit(BlocksReleased(request_id=request.request_id, group=group, block_ids=block_ids))
        self._finish_copies(holding)

    def reset(self) -> bool:
        return self._pool.reset()

    # ---- matching ----

    def _match_blocks(self, request: Request, max_blocks: int) -> int:
        """Return how many leading blocks every group can hit: the longest length valid for all."""
        full_groups = [group for group, spec in enumerate(self._groups) if spec.window is None]
        num_blocks = 0
        while num_blocks < max_blocks and all(self._find(request, group, num_blocks) for group in full_groups):
            num_blocks += 1
        while True:
            shorter = num_blocks
            for group, spec in enumerate(self._groups):
                if spec.window is not None:
                    shorter = self._match_window(request, group, shorter)
            if shorter == num_blocks:
                return num_blocks
            num_blocks = shorter

    def _match_window(self, request: Request, group: int, max_blocks: int) -> int:
        """Return the longest length of at most `max_blocks` whose last window and sinks are cached.

        Walks from the right to where the window begins.
        """
        spec = self._groups[group]
        for index in range(min(max_blocks, spec.num_sink_blocks(self._block_size))):
            if self._find(request, group, index) is None:
                return index
        end = index = max_blocks
        while index > spec.hidden_blocks(end * self._block_size, self._block_size).stop:
            index -= 1
            if self._find(request, group, index) is None:
                end = index
        return end

    def _hit_blocks(self, request: Request, group: int, num_blocks: int) -> tuple[Block | None, ...]:
        hidden = self._groups[group].hidden_blocks(num_blocks * self._block_size, self._block_size)
        hits = tuple(None if index in hidden else self._find(request, group, index) for index in range(num_blocks))
        assert sum(hit is None for hit in hits) == len(hidden)
        return hits

    def _match_tokens(
        self, request: Request, start: int, stop: int
    ) -> tuple[tuple[Block, ...], int, Divergence | None]:
        """Look for a block in each group whose first tokens continue the request from `start`."""
        if start == stop:
            return (), 0, None
        parent = self._key(request, start // self._block_size - 1)
        wanted = request.content.identity(start, stop)
        children = [index.best_child(parent, wanted) for index in self._pool.indexes]
        found = [child for child in children if child is not None]
        if len(found) < len(children):
            return (), 0, None
        run = min(child_run for _, child_run in found)
        near_misses = (
            _divergence(start, child_run, wanted, block)
            for block, child_run in found
            if child_run < min(block.num_keyed_tokens, stop - start)
        )
        return tuple(block for block, _ in found), run, next(near_misses, None)

    def _find(self, request: Request, group: int, index: int) -> Block | None:
        return self._pool.indexes[group].find(self._key(request, index))

    def _key(self, request: Request, index: int) -> BlockKey:
        """Return the key of the request's full block `index` (-1: its root), extending its chain as needed."""
        if index < 0:
            return request.root
        keys = request.keys
        while len(keys) <= index:
            start = len(keys) * self._block_size
            tokens = request.content.identity(start, start + self._block_size)
            keys.append(child_key(keys[-1] if keys else request.root, tokens, self._hash_function))
        return keys[index]

    # ---- bookkeeping ----

    def _record_copy(self, request: Request, holding: _Holding, source: Block, copy: Block) -> None:
        holding.copies.append(BlockCopy(source=source.id, destination=copy.id))
        self._num_copies_from[source.id] += 1
        holding.new_blocks.append(copy.id)
        self._events.emit(BlockCopied(request_id=request.request_id, source=source.id, destination=copy.id))

    def _finish_copies(self, holding: _Holding) -> None:
        for copy in holding.copies:
            self._num_copies_from[copy.source] -= 1
            if not self._num_copies_from[copy.source]:
                del self._num_copies_from[copy.source]
            self._pool.release(self._pool.blocks[copy.source])
        holding.copies.clear()

    def _held_alone(self, request: Request) -> frozenset[BlockId]:
        """Return the blocks that would be free if the request let go of all it holds."""
        holding = self._holdings[request.request_id]
        held = {block_id for table in holding.tables for block_id in table if block_id != NULL_BLOCK}
        held.update(copy.source for copy in holding.copies)
        return frozenset(BlockId(block_id) for block_id in held if self._pool.blocks[block_id].ref_count == 1)

    def _held_places(self, holding: _Holding, group: int) -> Sequence[int]:
        """Return the places of a table that name blocks, in order."""
        num_dropped, length = holding.num_dropped[group], len(holding.tables[group])
        if not num_dropped:
            return range(length)
        num_sink_blocks = self._groups[group].num_sink_blocks(self._block_size)
        return [*range(num_sink_blocks), *range(num_sink_blocks + num_dropped, length)]

    def _is_shared(self, block: Block) -> bool:
        """Say whether another table holds this block.

        References that only wait for a copy to be made do not count: copies come before writes in a step, so the last
        of n forks may go on writing in place, and n forks cost n - 1 copies.
        """
        return block.ref_count - self._num_copies_from[block.id] > 1

    def _land(self, request: Request, first: int, stop: int) -> None:
        """Stop announcing blocks `first..stop - 1` as being computed by this request."""
        for key in request.keys[first:stop]:
            if self._in_flight.get(key.hash) == request.request_id:
                del self._in_flight[key.hash]

    def _drop_out_of_window(self, request: Request, holding: _Holding) -> None:
        for group, spec in enumerate(self._groups):
            hidden = spec.hidden_blocks(request.num_computed_tokens, self._block_size)[holding.num_dropped[group] :]
            if not hidden:
                continue
            table = holding.tables[group]
            dropped = tuple(BlockId(table[index]) for index in hidden)
            for index, block_id in zip(hidden, dropped, strict=True):
                self._pool.release(self._pool.blocks[block_id])
                table[index] = NULL_BLOCK
            holding.num_dropped[group] += len(hidden)
            self._events.emit(BlocksReleased(request_id=request.request_id, group=group, block_ids=dropped))

    def _cache_tail(self, request: Request, holding: _Holding) -> None:
        """Name the computed part of the last block, so that a later request can copy it."""
        num_full, num_tail = divmod(request.num_computed_tokens, self._block_size)
        if num_tail == 0:
            return
        unmade_copies = {copy.destination for copy in holding.copies}
        start = num_full * self._block_size
        tokens = request.content.identity(start, start + num_tail)
        key = child_key(self._key(request, num_full - 1), tokens, self._hash_function)
        for group, table in enumerate(holding.tables):
            block = self._pool.blocks[table[num_full]]
            if block.ref_count == 1 and block.id not in unmade_copies:
                self._pool.cache(block, key, group=group, num_tokens=num_tail, is_full=False)

    def _find_longest(self) -> int:
        """Find by bisection the most tokens whose blocks fit; `num_blocks` never falls as tokens grow."""
        low, high = 0, self.num_usable_blocks * self._block_size
        if all(group.window is not None for group in self._groups):
            high = 2**31 - 1 if self.num_blocks(2**31 - 1) <= self.num_usable_blocks else high
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_blocks(middle) <= self.num_usable_blocks else (low, middle - 1)
        return low


def _divergence(start: int, run: int, wanted: bytes, block: Block) -> Divergence:
    assert block.key is not None
    return Divergence(
        position=start + run,
        block_id=block.id,
        token_id=token_at(wanted, run),
        cached_token_id=token_at(block.key.tokens, run),
    )
