"""The block pool: who holds which block, which is free, and which can be found again."""

import random

import pytest

from octavo.core.block_hash import child_key, root_key
from octavo.core.block_pool import BlockPool
from octavo.core.events import BlockCached, BlockEvicted, EventLog, PrefixCacheReset

ROOT = root_key(b"model", None)


class Pool:
    """A pool, its events, and a key maker."""

    def __init__(self, num_blocks=4, num_groups=1):
        self.log = EventLog()
        self.pool = BlockPool(num_blocks, num_groups=num_groups, events=self.log)

    def take(self, count=1):
        blocks = self.pool.allocate(count)
        assert blocks is not None
        return blocks

    def cached(self, content, *, group=0, is_full=True):
        """Take a block, name it after `content`, and let it go."""
        [block] = self.take()
        assert self.pool.cache(block, key(content), group=group, num_tokens=4 if is_full else 2, is_full=is_full)
        self.pool.release(block)
        return block


def key(content):
    return child_key(ROOT, content.to_bytes(4, "little"))


def free_ids(pool):
    return [block.id for block in pool.free_blocks]


def test_null_block_is_counted_nowhere_and_never_handed_out():
    pool = Pool(3).pool

    assert pool.num_usable_blocks == pool.num_free_blocks == 3
    assert len(pool.blocks) == 4
    assert {block.id for block in pool.allocate(3)} == {1, 2, 3}
    with pytest.raises(AssertionError, match="null"):
        pool.touch(pool.blocks[0])
    with pytest.raises(AssertionError):
        pool.release(pool.blocks[0])


@pytest.mark.parametrize(("num_blocks", "num_groups"), [(0, 1), (1, 0)])
def test_pool_needs_a_block_and_a_group(num_blocks, num_groups):
    with pytest.raises(AssertionError):
        BlockPool(num_blocks, num_groups=num_groups, events=EventLog())


def test_failed_allocation_changes_nothing():
    """Three of four blocks cached and free, one held: asking for four must not evict the three."""
    made = Pool(4)
    blocks = [made.cached(content) for content in range(3)]
    made.take()
    before = (free_ids(made.pool), [block.key for block in blocks])
    made.log.drain()

    assert made.pool.allocate(4) is None

    assert (free_ids(made.pool), [block.key for block in blocks]) == before
    assert made.log.drain() == []


def test_allocating_nothing_is_possible_in_a_full_pool():
    made = Pool(1)
    made.take()

    assert made.pool.allocate(0) == []


def test_block_handed_out_has_one_reference_and_no_name():
    made = Pool(1)
    evicted = made.cached(7)
    made.log.drain()
    [block] = made.take()

    assert block is evicted
    assert (block.ref_count, block.key, block.num_keyed_tokens) == (1, None, 0)
    assert made.pool.indexes[0].find(key(7)) is None
    [event] = made.log.drain()
    assert isinstance(event, BlockEvicted)
    assert (event.block_id, event.hash) == (block.id, key(7).hash.hex())


def test_eviction_tells_how_long_a_block_was_idle():
    made = Pool(1)
    made.pool.set_step(3)
    made.cached(7)
    made.pool.set_step(10)
    made.log.drain()
    made.take()

    [event] = made.log.drain()
    assert event.idle_steps == 7


def test_unnamed_blocks_are_reused_first_and_named_ones_last():
    made = Pool(4)
    first, second, third = made.take(3)
    made.pool.cache(first, key(1), group=0, num_tokens=4, is_full=True)
    for block in (first, second, third):
        made.pool.release(block)

    assert free_ids(made.pool) == [third.id, second.id, 4, first.id]


def test_block_is_free_only_when_its_last_holder_lets_go():
    made = Pool(2)
    [block] = made.take()
    made.pool.touch(block)
    made.pool.release(block)
    assert block.ref_count == 1
    assert block.id not in free_ids(made.pool)

    made.pool.release(block)
    assert block.id in free_ids(made.pool)


def test_block_cannot_be_released_once_too_often():
    made = Pool(2)
    [block] = made.take()
    made.pool.release(block)

    with pytest.raises(AssertionError, match="too often"):
        made.pool.release(block)
    assert free_ids(made.pool).count(block.id) == 1


def test_touched_block_is_out_of_evictions_reach():
    made = Pool(2)
    block = made.cached(7)
    made.pool.touch(block)

    assert made.pool.allocate(2) is None
    assert made.take()[0] is not block
    assert made.pool.indexes[0].find(key(7)) is block


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda pool, block: pool.release(block), id="not held"),
        pytest.param(
            lambda pool, block: pool.cache(block, key(1), group=0, num_tokens=4, is_full=True), id="named already"
        ),
    ],
)
def test_only_a_held_block_without_a_name_can_be_named(spoil):
    made = Pool(2)
    [block] = made.take()
    spoil(made.pool, block)

    with pytest.raises(AssertionError, match="cannot be cached"):
        made.pool.cache(block, key(2), group=0, num_tokens=4, is_full=True)


def test_shared_block_cannot_become_a_partial_child():
    """Its other holder may still write to it."""
    made = Pool(2)
    [block] = made.take()
    made.pool.touch(block)

    with pytest.raises(AssertionError, match="shared"):
        made.pool.cache(block, key(1), group=0, num_tokens=2, is_full=False)


def test_duplicate_stays_without_a_name():
    made = Pool(3)
    made.cached(7)
    [duplicate] = made.take()
    made.log.drain()

    assert not made.pool.cache(duplicate, key(7), group=0, num_tokens=4, is_full=True)
    assert (duplicate.key, duplicate.num_keyed_tokens) == (None, 0)
    assert made.log.drain() == []
    assert made.pool.num_cached_blocks == 1


def test_removing_one_content_keeps_the_others_findable():
    made = Pool(3)
    blocks = [made.cached(content) for content in range(3)]
    assert made.take()[0] is blocks[0]

    assert [made.pool.indexes[0].find(key(content)) for content in range(3)] == [None, *blocks[1:]]


def test_groups_have_indexes_of_their_own():
    made = Pool(2, num_groups=2)
    first, second = made.cached(7, group=0), made.cached(7, group=1)

    assert [index.find(key(7)) for index in made.pool.indexes] == [first, second]
    assert made.pool.num_cached_blocks == 2
    assert made.pool.reset()
    assert [index.find(key(7)) for index in made.pool.indexes] == [None, None]


def test_naming_a_block_is_announced_with_its_parent():
    made = Pool()
    made.cached(7, is_full=False)

    [event] = made.log.drain()
    assert event == BlockCached(block_id=1, group=0, num_tokens=2, hash=key(7).hash.hex(), parent_hash=ROOT.hash.hex())


def test_reset_forgets_everything_once_nothing_is_held():
    made = Pool(3)
    made.cached(1)
    made.cached(2)
    [held] = made.take()
    made.log.drain()

    assert not made.pool.reset()
    assert made.pool.num_cached_blocks == 2
    assert made.log.drain() == []

    made.pool.release(held)
    assert made.pool.reset()
    assert made.pool.num_cached_blocks == 0
    assert made.pool.num_free_blocks == 3
    assert made.log.drain()[-1] == PrefixCacheReset(num_blocks=2)


def test_pool_keeps_its_books_under_random_use():
    """References against a plain count of holders; free, cached and in use add up after every call."""
    rng = random.Random(11)
    made = Pool(8, num_groups=2)
    pool = made.pool
    held = []
    num_evicted = 0
    for step in range(4_000):
        action = rng.random()
        if action < 0.3:
            count = rng.randrange(4)
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > 8 - len(set(held)))
            held += [block.id for block in blocks or ()]
        elif action < 0.6 and held:
            block = pool.blocks[held.pop(rng.randrange(len(held)))]
            if block.key is None and rng.random() < 0.7 and held.count(block.id) == 0:
                is_full = rng.random() < 0.7
                content = key(rng.randrange(12))
                pool.cache(block, content, group=rng.randrange(2), num_tokens=4 if is_full else 2, is_full=is_full)
            pool.release(block)
        elif action < 0.8:
            block = rng.choice(pool.blocks[1:])
            if block.key is not None:
                pool.touch(block)
                held.append(block.id)
        elif action < 0.82:
            assert pool.reset() == (not held)
        pool.set_step(step)
        num_evicted += sum(isinstance(event, BlockEvicted) for event in made.log.drain())
        for block in pool.blocks[1:]:
            assert block.ref_count == held.count(block.id)
        free = free_ids(pool)
        assert sorted(free) == sorted({block.id for block in pool.blocks[1:]} - set(held))
        keyed = {block.id for block in pool.blocks if block.key is not None}
        indexed = [block.id for index in pool.indexes for block in index.blocks()]
        assert sorted(indexed) == sorted(keyed)
        assert pool.num_cached_blocks == len(keyed)
        assert 0 <= pool.num_free_blocks == 8 - len(set(held))
    assert num_evicted > 50
