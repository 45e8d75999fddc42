"""The prefix index: whole blocks by key, and the child that shares the longest run of tokens."""

from array import array

import pytest

from octavo.core.block import Block
from octavo.core.block_hash import chain_hash, child_key, root_key
from octavo.core.content import common_tokens
from octavo.core.prefix_index import MAX_CHILDREN_COMPARED, PrefixIndex
from octavo.testing.factories import constant_hash, four_bit_hash

ROOT = root_key(b"model", None)


def ids(*tokens):
    return array("i", tokens).tobytes()


class Index:
    """An index with blocks made for it, numbered from 1."""

    def __init__(self, hash_function=chain_hash):
        self.index = PrefixIndex()
        self.root = root_key(b"model", None, hash_function)
        self._hash_function = hash_function
        self._num_blocks = 0

    def key(self, *tokens, parent=None):
        return child_key(parent or self.root, ids(*tokens), self._hash_function)

    def add(self, *tokens, parent=None, is_full=True):
        """Add a block and return it, or `None` if the index has no use for it."""
        self._num_blocks += 1
        block = Block(self._num_blocks)
        block.key = self.key(*tokens, parent=parent)
        return block if self.index.add(block, is_full=is_full) else None

    def best(self, *tokens, parent=None):
        return self.index.best_child(parent or self.root, ids(*tokens))


def test_full_block_is_found_by_an_equal_key():
    index = Index()
    block = index.add(1, 2, 3, 4)

    assert index.index.find(index.key(1, 2, 3, 4)) is block
    assert index.index.find(index.key(1, 2, 3, 5)) is None
    assert list(index.index.blocks()) == [block]


def test_partial_block_is_not_found_as_a_full_one():
    index = Index()
    block = index.add(1, 2, is_full=False)

    assert index.index.find(index.key(1, 2)) is None
    assert index.best(1, 2, 3) == (block, 2)
    assert len(index.index) == 1


def test_duplicate_of_a_full_block_is_refused_and_the_first_stays():
    index = Index()
    first = index.add(1, 2, 3, 4)

    assert index.add(1, 2, 3, 4) is None
    assert index.index.find(index.key(1, 2, 3, 4)) is first
    assert len(index.index) == 1


def test_removed_block_is_forgotten_in_both_ways():
    index = Index()
    block, sibling = index.add(1, 2, 3, 4), index.add(1, 2, 9, 9)
    index.index.remove(block)

    assert index.index.find(index.key(1, 2, 3, 4)) is None
    assert index.best(1, 2, 3, 4) == (sibling, 2)
    index.index.remove(sibling)
    assert index.best(1, 2, 3, 4) is None
    assert len(index.index) == 0
    assert not index.index._children, "an empty slot is left behind"


def test_partial_child_with_the_hash_of_a_full_block_does_not_take_its_place():
    """Removing the partial one must not lose the full one, whatever their hashes."""
    index = Index(constant_hash)
    full = index.add(1, 2, 3, 4)
    partial = index.add(7, 8, is_full=False)
    index.index.remove(partial)

    assert index.index.find(index.key(1, 2, 3, 4)) is full


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((1, 2, 3, 4), (2, 3)),
        ((1, 2, 9), (3, 3)),
        ((1, 2), (3, 2)),
        ((1,), (3, 1)),
        ((1, 7, 7, 7), (3, 1)),
        ((2, 2, 3), None),
    ],
    ids=["longest run", "other child", "ties go to the newest", "one token", "diverges at once", "other first token"],
)
def test_best_child_shares_the_longest_run(wanted, expected):
    index = Index()
    index.add(1, 5, 5, 5)
    index.add(1, 2, 3, is_full=False)
    index.add(1, 2, 9, 9)

    best = index.best(*wanted)

    assert (best and (best[0].id, best[1])) == expected


def test_children_of_another_parent_do_not_count():
    index = Index()
    other = index.key(8, 8, 8, 8)
    index.add(1, 2, 3, 4, parent=other)

    assert index.best(1, 2, 3, 4) is None
    assert index.best(1, 2, 3, 9, parent=other) is not None


def test_at_most_eight_children_are_compared_the_newest_first():
    """The best child is the ninth newest, so it is not seen; one newer and it is."""
    index = Index()
    index.add(1, 2, 3, 4)
    for token in range(MAX_CHILDREN_COMPARED):
        index.add(1, 2, 100 + token, 0)
    assert index.best(1, 2, 3, 9)[1] == 2

    index.add(1, 2, 3, 8)
    assert index.best(1, 2, 3, 9)[1] == 3


def test_number_of_comparisons_is_bounded(monkeypatch):
    """1,000 continuations of one prefix: a lookup still compares eight."""
    index = Index()
    for token in range(1_000):
        index.add(1, token, 0, 0)
    calls = []
    monkeypatch.setattr(
        "octavo.core.prefix_index.common_tokens", lambda *pair: calls.append(pair) or common_tokens(*pair)
    )

    assert index.best(1, 999, 5) is not None
    assert len(calls) == MAX_CHILDREN_COMPARED


def test_partial_child_that_another_covers_is_refused():
    index = Index()
    index.add(1, 2, 3, is_full=False)

    assert index.add(1, 2, is_full=False) is None
    assert index.add(1, 2, 3, is_full=False) is None
    assert index.add(1, 2, 4, is_full=False) is not None
    assert index.add(1, 2, 3, 4, is_full=True) is not None
    assert index.add(1, 2, 3, is_full=False) is None


@pytest.mark.parametrize("hash_function", [constant_hash, four_bit_hash], ids=["constant", "four bits"])
def test_colliding_hashes_never_give_foreign_blocks(hash_function):
    """Fifty contents share a hash or sixteen of them: a lookup finds the right block or none."""
    index = Index(hash_function)
    contents = [(first, second, 0, 0) for first in range(5) for second in range(10)]
    added = {content: block for content in contents if (block := index.add(*content)) is not None}

    assert 0 < len(added) <= 16
    for content in contents:
        found = index.index.find(index.key(*content))
        assert found is added.get(content)
        parent = index.key(*content)
        assert index.best(*content, parent=parent) is None, "a root's child is taken for a grandchild"
    for content, block in added.items():
        assert index.best(*content[:3], 9) == (block, 3) or index.best(*content[:3], 9)[0].key.tokens[:12] == ids(
            *content[:3]
        )
        index.index.remove(block)
    assert len(index.index) == 0


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((), (1,), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), (1, 2), 2), ((1, 9), (1, 2), 1), ((256,), (512,), 0)],
)
def test_common_tokens_counts_whole_tokens(first, second, expected):
    assert common_tokens(ids(*first), ids(*second)) == expected
    assert common_tokens(ids(*second), ids(*first)) == expected
