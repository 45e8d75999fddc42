"""The free queue: an intrusive list that must agree with a plain one whatever is done to it."""

import random

import pytest

from octavo.core.block import Block
from octavo.core.free_queue import FreeQueue


def blocks(count):
    return [Block(index) for index in range(1, count + 1)]


def filled(count):
    queue, members = FreeQueue(), blocks(count)
    for block in members:
        queue.append(block)
    return queue, members


def check(queue, expected):
    """Check content, length and the links in both directions."""
    assert [block.id for block in queue] == [block.id for block in expected]
    assert len(queue) == len(expected)
    backwards = []
    block = queue._tail.previous
    while block is not queue._head:
        backwards.append(block.id)
        assert block.next.previous is block
        block = block.previous
    assert backwards == [block.id for block in reversed(expected)]


def test_blocks_leave_in_the_order_they_came():
    queue, members = filled(3)

    assert [queue.pop_front() for _ in range(3)] == members
    check(queue, [])


def test_prepended_block_leaves_first():
    queue, members = filled(2)
    urgent = Block(9)
    queue.prepend(urgent)

    check(queue, [urgent, *members])


@pytest.mark.parametrize("position", range(3))
def test_block_is_taken_out_of_wherever_it_stands(position):
    queue, members = filled(3)
    queue.remove(members[position])

    check(queue, [block for index, block in enumerate(members) if index != position])
    assert members[position].next is None
    assert members[position].previous is None


def test_removed_block_may_come_back():
    queue, members = filled(3)
    queue.remove(members[1])
    queue.append(members[1])

    check(queue, [members[0], members[2], members[1]])


def test_pop_from_an_empty_queue_is_an_error():
    """Never the sentinel: a block with id -1 would be written to."""
    queue, _ = filled(0)
    with pytest.raises(AssertionError, match="empty"):
        queue.pop_front()


@pytest.mark.parametrize("add", [FreeQueue.append, FreeQueue.prepend])
def test_block_cannot_be_added_twice(add):
    queue, members = filled(2)
    with pytest.raises(AssertionError, match="already"):
        add(queue, members[0])
    check(queue, members)


def test_block_outside_cannot_be_removed():
    queue, members = filled(2)
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(Block(9))
    check(queue, members)


def test_queue_equals_a_plain_list_under_random_use():
    rng = random.Random(5)
    queue, outside = FreeQueue(), blocks(12)
    model = []
    for _ in range(3_000):
        action = rng.choice(["append", "prepend", "remove", "pop"])
        if action in ("append", "prepend") and outside:
            block = outside.pop(rng.randrange(len(outside)))
            getattr(queue, action)(block)
            model.insert(0 if action == "prepend" else len(model), block)
        elif action == "remove" and model:
            block = model.pop(rng.randrange(len(model)))
            queue.remove(block)
            outside.append(block)
        elif action == "pop" and model:
            block = queue.pop_front()
            assert block is model.pop(0)
            outside.append(block)
        check(queue, model)
