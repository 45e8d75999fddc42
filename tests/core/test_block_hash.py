"""Chained hashes: what separates contents, and what comparing them costs."""

import pytest

from octavo.core.block import BlockKey
from octavo.core.block_hash import chain_hash, child_key, root_key
from octavo.testing.factories import constant_hash, make_request


def chain(root, num_blocks, hash_function=chain_hash):
    """Return the keys of blocks that hold their own number."""
    keys = [root]
    for index in range(num_blocks):
        keys.append(child_key(keys[-1], index.to_bytes(4, "little"), hash_function))
    return keys[1:]


def test_same_history_has_the_same_hash():
    first, second = (chain(root_key(b"m", None), 3) for _ in range(2))

    assert [key.hash for key in first] == [key.hash for key in second]
    assert len({key.hash for key in first}) == 3
    assert all(len(key.hash) == 16 for key in first)


@pytest.mark.parametrize("position", range(8))
def test_each_token_of_a_block_counts(position):
    """Also the last one: engines have shipped hashes that left it out."""
    ids = list(range(8))
    changed = [*ids[:position], 99, *ids[position + 1 :]]
    root = root_key(b"m", None)

    keys = [child_key(root, make_request(some).content.identity(0, 8)) for some in (ids, changed)]

    assert keys[0].hash != keys[1].hash
    assert not keys[0].is_same_content(keys[1])


def test_same_block_after_another_parent_is_another_content():
    root = root_key(b"m", None)
    first, second = (child_key(child_key(root, parent), b"same") for parent in (b"aaaa", b"bbbb"))

    assert first.hash != second.hash
    assert not first.is_same_content(second)


def test_contents_are_told_apart_when_hashes_collide():
    root = root_key(b"m", None, constant_hash)
    first = child_key(root, b"aaaa", constant_hash)

    assert first.hash == child_key(root, b"bbbb", constant_hash).hash
    assert not first.is_same_content(child_key(root, b"bbbb", constant_hash))
    assert not child_key(first, b"cccc", constant_hash).is_same_content(child_key(root, b"cccc", constant_hash))
    assert first.is_same_content(child_key(root_key(b"m", None, constant_hash), b"aaaa", constant_hash))


SALTS = [None, "", "a", "b", "ab", "\0", "\1a", "7", "é", "x" * 1_000_000, "\ud800"]


def test_every_salt_is_a_tenant_of_its_own():
    """None and "" differ, and so do strings that glued keys would confuse."""
    hashes = [root_key(b"model", salt).hash for salt in SALTS]

    assert len(set(hashes)) == len(SALTS)
    assert hashes == [root_key(b"model", salt).hash for salt in SALTS]


def test_fingerprint_and_salt_cannot_be_confused():
    assert root_key(b"ab", "c").hash != root_key(b"a", "bc").hash
    assert root_key(b"ab", None).hash != root_key(b"a", "b").hash
    assert root_key(b"", "ab").tokens != root_key(b"ab", "").tokens


@pytest.mark.parametrize("order", ["left to right", "right to left"])
def test_comparing_two_chains_costs_their_length_once(order, monkeypatch):
    """Keys made twice are joined when they are found equal, in whichever direction the blocks are looked up.

    A request whose layers all have a window is matched from the right; joining one key only made that 500 times 500
    comparisons.
    """
    num_blocks = 500
    cached, wanted = (chain(root_key(b"m", None), num_blocks) for _ in range(2))
    pairs = list(zip(wanted, cached, strict=True))
    num_reads = 0
    read = BlockKey.tokens.__get__

    class Counted:
        def __get__(self, key, kind):
            nonlocal num_reads
            num_reads += 1
            return read(key, kind)

    monkeypatch.setattr(BlockKey, "tokens", Counted())
    for mine, theirs in pairs if order == "left to right" else reversed(pairs):
        assert mine.is_same_content(theirs)

    assert num_reads <= 6 * num_blocks


def test_comparison_needs_chains_of_equal_length():
    keys = chain(root_key(b"m", None), 3)
    shorter = BlockKey(None, keys[2].tokens, keys[2].hash)

    assert not keys[2].is_same_content(shorter)
    assert not shorter.is_same_content(keys[2])


def test_very_long_chain_can_be_dropped():
    """A chain of a million tokens in blocks of one is a linked list; freeing it must not recurse that deep."""
    keys = chain(root_key(b"m", None), 300_000)
    assert keys[-1].parent is keys[-2]
    last = keys.pop()
    keys.clear()
    del last
