"""Bytes of a KV pool to blocks that requests can use, and back. The only place where the null block is counted.

Block 0 is never handed out (it fills block tables), so a pool holds one block more than requests can use. Every
capacity figure (plan, admission, usage, concurrency) speaks of *usable* blocks.
"""

from __future__ import annotations

NUM_NULL_BLOCKS = 1


def usable_blocks(pool_bytes: int, block_bytes: int) -> int:
    """Return how many blocks of a pool requests can use; 0 when it holds no more than the null block."""
    return max(0, pool_bytes // block_bytes - NUM_NULL_BLOCKS)


def pool_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of a pool with so many usable blocks."""
    return (num_blocks + NUM_NULL_BLOCKS) * block_bytes
