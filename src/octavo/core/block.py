"""Block and BlockKey: one place of the pool, and the name of what it holds.

A block is in exactly one of these states:

    in use   ref_count > 0: some block tables hold it; not in the free queue
    cached   ref_count = 0 and it has a key: in the free queue, still found by the prefix index
    free     ref_count = 0 and no key: in the free queue, content meaningless

A block in use may have a key too (it can be shared), and a block with a key is never written again.
"""

from __future__ import annotations

from typing import NewType

from octavo.units import BlockId

BlockHash = NewType("BlockHash", bytes)


class BlockKey:
    """The name of a block's content: its tokens and, through `parent`, every token before them.

    Keys form a tree from a root (model, dtypes, salt) downwards. `hash` is the fast way to find a block; equality is
    decided by the tokens themselves, so that a collision costs a hit and never an answer.

    Args:
        parent: Key of the block before; `None` for a root.
        tokens: What identifies the tokens (see `content.py`), or the root's own bytes.
        hash: Chained hash of all of it.
    """

    __slots__ = ("hash", "parent", "tokens")

    def __init__(self, parent: BlockKey | None, tokens: bytes, hash: BlockHash) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hash = hash

    def is_same_content(self, other: BlockKey) -> bool:
        """Say whether both keys name the same tokens after the same history.

        Walks up until the two chains meet in one object. On success every key of this chain is joined to the other's
        (equal content, so nothing changes in meaning), and the next comparison in either direction stops after two
        steps: without that, matching n blocks whose keys were made twice would cost n^2.
        """
        mine: BlockKey | None = self
        theirs: BlockKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.tokens != theirs.tokens:
                return False
            mine, theirs = mine.parent, theirs.parent
        mine, theirs = self, other
        while mine is not None and theirs is not None and mine is not theirs:
            above = mine.parent
            mine.parent = theirs.parent
            mine, theirs = above, theirs.parent
        return True


class Block:
    """Bookkeeping of one block; made once with the pool. Only `BlockPool` and `FreeQueue` write its fields.

    `num_keyed_tokens` says how many of its tokens `key` names: `block_size`, or fewer for a partial child.
    `freed_step` is the step in which it last lost its last reference.
    """

    __slots__ = ("freed_step", "group", "id", "key", "next", "num_keyed_tokens", "previous", "ref_count")

    def __init__(self, block_id: BlockId) -> None:
        self.id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.num_keyed_tokens = 0
        self.group = 0
        self.freed_step = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        named = f", {self.num_keyed_tokens} tokens cached" if self.key else ""
        return f"Block({self.id}, ref_count={self.ref_count}{named})"
