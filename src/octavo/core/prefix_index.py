"""PrefixIndex: finds cached blocks of one KV group by what they hold.

Two ways in, one per kind of hit:

    find(key)              the full block with this key: exact, whole blocks
    best_child(parent, ..) of the blocks cached below `parent`, the one that shares the longest run of tokens: token by
                           token, to be copied (the block itself belongs to another continuation)

Only `BlockPool` calls `add` and `remove`. A lookup changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from octavo.core.block import Block, BlockHash, BlockKey
from octavo.core.content import TOKEN_BYTES, common_tokens
from octavo.units import BlockId

MAX_CHILDREN_COMPARED = 8
"""Bounds the cost of a token-granular lookup where thousands of continuations share a parent; newest first."""


class PrefixIndex:
    """Cached blocks of one group, by hash and by (parent, first token)."""

    def __init__(self) -> None:
        self._full: dict[BlockHash, Block] = {}
        self._children: dict[tuple[BlockHash, bytes], dict[BlockId, Block]] = {}

    def __len__(self) -> int:
        return sum(len(siblings) for siblings in self._children.values())

    def blocks(self) -> Iterator[Block]:
        """Iterate over every indexed block, full and partial."""
        for siblings in self._children.values():
            yield from siblings.values()

    def find(self, key: BlockKey) -> Block | None:
        """Return the full block that holds exactly what `key` names; compares the tokens, not only the hash."""
        block = self._full.get(key.hash)
        if block is None:
            return None
        assert block.key is not None
        return block if key.is_same_content(block.key) else None

    def best_child(self, parent: BlockKey, tokens: bytes) -> tuple[Block, int] | None:
        """Return the child of `parent` that shares the longest run with `tokens`, and the run's length in tokens.

        Args:
            parent: Key of the block before.
            tokens: Identity of the tokens wanted, at least one.
        Cost: at most `MAX_CHILDREN_COMPARED` comparisons of up to a block each.
        """
        siblings = self._children.get((parent.hash, tokens[:TOKEN_BYTES]))
        best: tuple[Block, int] | None = None
        for block in islice(reversed(siblings.values()), MAX_CHILDREN_COMPARED) if siblings else ():
            assert block.key is not None and block.key.parent is not None
            if not parent.is_same_content(block.key.parent):
                continue
            run = common_tokens(block.key.tokens, tokens)
            if run and (best is None or run > best[1]):
                best = block, run
        return best

    def add(self, block: Block, *, is_full: bool) -> bool:
        """Index a block by its key; `False` if another block already answers for the same hash or covers its tokens.

        The duplicate simply stays without a key: tables are append-only, so it cannot be exchanged for the first one,
        and it is freed with its request.
        """
        key = block.key
        assert key is not None and key.parent is not None
        if is_full:
            if key.hash in self._full:
                return False
            self._full[key.hash] = block
        else:
            child = self.best_child(key.parent, key.tokens)
            if child is not None and child[1] * TOKEN_BYTES >= len(key.tokens):
                return False
        self._children.setdefault(_child_slot(key), {})[block.id] = block
        return True

    def remove(self, block: Block) -> None:
        """Forget a block."""
        key = block.key
        assert key is not None
        if self._full.get(key.hash) is block:
            del self._full[key.hash]
        siblings = self._children[_child_slot(key)]
        del siblings[block.id]
        if not siblings:
            del self._children[_child_slot(key)]


def _child_slot(key: BlockKey) -> tuple[BlockHash, bytes]:
    assert key.parent is not None
    return key.parent.hash, key.tokens[:TOKEN_BYTES]
