"""FreeQueue: unreferenced blocks in the order in which they will be handed out again.

An intrusive doubly linked list: blocks carry their own links, so that popping, appending and taking a block out of the
middle (a cached block that is hit) are O(1) and allocate nothing. The front is reused first; the order doubles as the
LRU order of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.block import Block
from octavo.units import BlockId

_SENTINEL_ID = BlockId(-1)


class FreeQueue:
    """Doubly linked list of free blocks between two sentinels. Every operation but iteration is O(1)."""

    def __init__(self) -> None:
        self._head = Block(_SENTINEL_ID)
        self._tail = Block(_SENTINEL_ID)
        self._head.next = self._tail
        self._tail.previous = self._head
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def pop_front(self) -> Block:
        """Take the block that has waited longest. The queue must not be empty."""
        block = self._head.next
        assert block is not None and block is not self._tail, "pop from an empty free queue"
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        """Add a block at the end: reused last."""
        assert self._tail.previous is not None
        self._insert_after(self._tail.previous, block)

    def prepend(self, block: Block) -> None:
        """Add a block at the front: reused next."""
        self._insert_after(self._head, block)

    def remove(self, block: Block) -> None:
        """Take a block out of wherever it stands."""
        before, after = block.previous, block.next
        assert before is not None and after is not None, f"{block} is not in the free queue"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._num_blocks -= 1

    def _insert_after(self, before: Block, block: Block) -> None:
        assert block.previous is None and block.next is None, f"{block} is in the free queue already"
        after = before.next
        assert after is not None
        before.next = after.previous = block
        block.previous, block.next = before, after
        self._num_blocks += 1
