"""BlockPool: who holds which block, which are free, and which can be found again.

Owns reference counts, the free queue and the prefix indexes (one per KV group). Eviction is lazy: a block keeps its key
while it waits in the free queue and loses it only when its memory is handed out again, so a cached block costs nothing
until it is needed. Block 0 is the null block: filler in tables, never handed out, counted in no capacity figure.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.block import Block, BlockKey
from octavo.core.events import BlockCached, BlockEvicted, EventLog, PrefixCacheReset
from octavo.core.free_queue import FreeQueue
from octavo.core.prefix_index import PrefixIndex
from octavo.units import BlockId

EMPTY, CACHED = 0, 1
"""What `BlockPool.block_map` says of a block that nobody holds; of a held one it says 1 + its holders."""
MANY = 255
"""254 holders or more: a byte says no more."""


class BlockPool:
    """All blocks, made once.

    Args:
        num_usable_blocks: Blocks that requests can hold; the null block comes on top.
        num_groups: KV groups that draw from this pool; each has its own prefix index.
        events: Receives `BlockCached` and `BlockEvicted`.
    """

    def __init__(self, num_usable_blocks: int, *, num_groups: int, events: EventLog) -> None:
        assert num_usable_blocks > 0 and num_groups > 0
        self._blocks = [Block(BlockId(index)) for index in range(num_usable_blocks + 1)]
        self._free = FreeQueue()
        for block in self._blocks[1:]:
            self._free.append(block)
        self._indexes = [PrefixIndex() for _ in range(num_groups)]
        self._events = events
        self._step = 0
        # Kept up to date with each change, so that looking at a hundred thousand blocks is one copy of bytes.
        self._map = bytearray(num_usable_blocks + 1)

    @property
    def num_usable_blocks(self) -> int:
        return len(self._blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with a key, in use or not."""
        return sum(len(index) for index in self._indexes)

    @property
    def indexes(self) -> Sequence[PrefixIndex]:
        """Prefix index of each group; for lookups only."""
        return self._indexes

    @property
    def blocks(self) -> Sequence[Block]:
        """Every block by id, the null block first; for reading only."""
        return self._blocks

    @property
    def free_blocks(self) -> FreeQueue:
        """The free queue in the order of reuse; for reading only."""
        return self._free

    def block_map(self) -> bytes:
        """Return a byte per usable block, in the order of ids from 1 on: `EMPTY`, `CACHED`, or 1 + its holders."""
        return bytes(self._map[1:])

    def set_step(self, step: int) -> None:
        """Tell the pool which step it is, so that evictions can say how long a block was idle."""
        self._step = step

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Hand out blocks with one reference each, evicting what they cached; `None` (and no change) if too few."""
        if num_blocks > len(self._free):
            return None
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop_front()
            if block.key is not None:
                self._evict(block)
            block.ref_count = 1
            self._map[block.id] = 2
            taken.append(block)
        return taken

    def touch(self, block: Block) -> None:
        """Add a reference; takes a cached block out of the free queue, and so out of eviction's reach."""
        assert block.id != 0, "the null block is never held"
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1
        self._map[block.id] = min(block.ref_count + 1, MANY)

    def release(self, block: Block) -> None:
        """Drop a reference. The last one sends the block to the free queue.

        A cached block goes to the end (reused last), one without a key to the front. Callers release the blocks of a
        request tail first, so that of one request the deepest blocks are evicted first and never leave an
        unreachable rest behind them.
        """
        assert block.ref_count > 0, f"{block} is released once too often"
        block.ref_count -= 1
        if block.ref_count > 0:
            self._map[block.id] = min(block.ref_count + 1, MANY)
            return
        block.freed_step = self._step
        if block.key is None:
            self._map[block.id] = EMPTY
            self._free.prepend(block)
        else:
            self._map[block.id] = CACHED
            self._free.append(block)

    def cache(self, block: Block, key: BlockKey, *, group: int, num_tokens: int, is_full: bool) -> bool:
        """Name a computed block so that later requests find it; `False` if its content is cached already.

        The block must be held (ref_count > 0) and have no key. A partial child (`is_full=False`) must have no other
        holder and be released right after: nobody may append to it any more.
        """
        assert block.ref_count > 0 and block.key is None, f"{block} cannot be cached"
        assert is_full or block.ref_count == 1, f"{block} is shared, and a holder may still write to it"
        assert key.parent is not None
        block.key, block.group, block.num_keyed_tokens = key, group, num_tokens
        if not self._indexes[group].add(block, is_full=is_full):
            block.key, block.num_keyed_tokens = None, 0
            return False
        self._events.emit(
            BlockCached(
                block_id=block.id,
                group=group,
                num_tokens=num_tokens,
                hash=key.hash.hex(),
                parent_hash=key.parent.hash.hex(),
            )
        )
        return True

    def reset(self) -> bool:
        """Forget everything cached. `False`, and no change, while any block is in use."""
        if len(self._free) != self.num_usable_blocks:
            return False
        num_blocks = self.num_cached_blocks
        for block in self._blocks:
            if block.key is not None:
                self._evict(block)
        self._events.emit(PrefixCacheReset(num_blocks=num_blocks))
        return True

    def _evict(self, block: Block) -> None:
        assert block.key is not None
        self._map[block.id] = EMPTY
        self._indexes[block.group].remove(block)
        self._events.emit(
            BlockEvicted(
                block_id=block.id,
                group=block.group,
                hash=block.key.hash.hex(),
                idle_steps=self._step - block.freed_step,
            )
        )
        block.key, block.num_keyed_tokens = None, 0
