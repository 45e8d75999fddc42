"""The invariants must see what they are for: each kind of damage is done once, and noticed."""

import dataclasses
from array import array

import pytest

from octavo.core.block import BlockKey
from octavo.core.invariants import check_idle, check_plan, check_scheduler
from octavo.core.request import RequestStatus
from octavo.core.step import BlockCopy
from octavo.testing.factories import CoreSetup, Rig


def running_rig(**setup):
    """A rig in the middle of work: two requests share a prefix, one waits, blocks are cached."""
    rig = Rig(CoreSetup(**{"max_num_seqs": 2, "num_blocks": 12, **setup}))
    rig.add([*range(8), 9], max_tokens=1)
    rig.run_to_end()
    rig.add([*range(8), 10], max_tokens=9)
    rig.add([*range(8), 11], max_tokens=9)
    rig.add([5], max_tokens=9)
    rig.run(2)
    check_scheduler(rig.scheduler)
    return rig


def first_table(rig):
    return rig.paged.tables(rig.scheduler.running[0])[0]


def lose_a_reference(rig):
    rig.paged.pool.blocks[first_table(rig)[0]].ref_count -= 1


def add_a_reference(rig):
    rig.paged.pool.blocks[first_table(rig)[-1]].ref_count += 1


def free_a_held_block(rig):
    rig.paged.pool.free_blocks.append(rig.paged.pool.blocks[first_table(rig)[-1]])


def lose_a_free_block(rig):
    rig.paged.pool.free_blocks.pop_front()


def list_a_block_twice(rig):
    first_table(rig)[1] = first_table(rig)[0]


def hold_the_null_block(rig):
    rig.paged.pool.blocks[0].ref_count = 1


def forget_an_indexed_block(rig):
    block = rig.paged.pool.blocks[first_table(rig)[0]]
    rig.paged.pool.indexes[0].remove(block)


def drop_the_name_of_an_indexed_block(rig):
    rig.paged.pool.blocks[first_table(rig)[0]].key = None


def name_a_block_after_other_tokens(rig):
    block = rig.paged.pool.blocks[first_table(rig)[0]]
    index = rig.paged.pool.indexes[0]
    index.remove(block)
    block.key = BlockKey(block.key.parent, array("i", [7, 7, 7, 7]).tobytes(), b"other")
    index.add(block, is_full=True)


def move_a_block_to_another_group(rig):
    rig.paged.pool.blocks[first_table(rig)[0]].group = 1


def name_more_tokens_than_a_block_has(rig):
    rig.paged.pool.blocks[first_table(rig)[0]].num_keyed_tokens = 5


def drop_a_block_of_computed_tokens(rig):
    rig.paged.pool.release(rig.paged.pool.blocks[first_table(rig).pop()])


def put_a_null_block_in_the_middle(rig):
    table = first_table(rig)
    rig.paged.pool.release(rig.paged.pool.blocks[table[1]])
    table[1] = 0


def lose_a_waiting_request(rig):
    rig.scheduler._waiting.pop()


def run_a_waiting_request(rig):
    rig.scheduler.requests[-1].status = RequestStatus.RUNNING


def keep_a_finished_request(rig):
    rig.scheduler.requests[-1].status = RequestStatus.FINISHED


def compute_more_than_is_known(rig):
    request = rig.scheduler.running[0]
    request.num_computed_tokens = request.num_known_tokens


def compute_for_a_waiting_request(rig):
    rig.scheduler.requests[-1].num_computed_tokens = 1


def exceed_the_length(rig):
    rig.scheduler.running[0].max_total_tokens = 1


def count_hits_beyond_the_prompt(rig):
    rig.scheduler.running[0].num_hit_tokens = 1_000


def attach_a_running_fork(rig):
    rig.scheduler.running[0].forks = (rig.scheduler.running[1],)


def lose_a_fork(rig):
    rig.scheduler.requests[-1].status = RequestStatus.FORKING


def keep_a_block_too_many(rig):
    [extra] = rig.paged.pool.allocate(1)
    first_table(rig).append(extra.id)


def take_more_seats_than_there_are(rig):
    object.__setattr__(rig.scheduler.limits, "max_num_seqs", 1)


DAMAGE = [
    lose_a_reference,
    add_a_reference,
    free_a_held_block,
    lose_a_free_block,
    list_a_block_twice,
    hold_the_null_block,
    forget_an_indexed_block,
    drop_the_name_of_an_indexed_block,
    name_a_block_after_other_tokens,
    move_a_block_to_another_group,
    name_more_tokens_than_a_block_has,
    drop_a_block_of_computed_tokens,
    put_a_null_block_in_the_middle,
    lose_a_waiting_request,
    run_a_waiting_request,
    keep_a_finished_request,
    compute_more_than_is_known,
    compute_for_a_waiting_request,
    exceed_the_length,
    count_hits_beyond_the_prompt,
    attach_a_running_fork,
    lose_a_fork,
    keep_a_block_too_many,
    take_more_seats_than_there_are,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_noticed(damage):
    rig = running_rig()
    damage(rig)

    with pytest.raises(AssertionError):
        check_scheduler(rig.scheduler)


@pytest.mark.parametrize("damage", ["overlapping runs", "broken run", "lost run"])
def test_damage_to_runs_is_noticed(damage):
    rig = Rig(CoreSetup(allocator="reserved", num_blocks=16, max_model_len=16, max_num_seqs=2))
    rig.add(5)
    rig.add([9])
    rig.step()
    first, second = (rig.scheduler.kv_cache.tables(request)[0] for request in rig.scheduler.running)
    if damage == "overlapping runs":
        second[:] = first
    elif damage == "broken run":
        first[1], first[2] = first[2], first[1]
    else:
        rig.scheduler.kv_cache._runs["stray"] = 2

    with pytest.raises(AssertionError):
        check_scheduler(rig.scheduler)


def copying_rig():
    """A rig whose plan in flight has a copy: a hit that ends inside a block."""
    rig = Rig(CoreSetup(num_blocks=12))
    rig.add(range(7), max_tokens=1)
    rig.run_to_end()
    rig.add([*range(6), 9, 9, 9, 9, 9], max_tokens=3)
    rig.add([*range(4), 8, 8], max_tokens=3)
    plan = rig.schedule()
    assert plan.copies
    return rig, plan


def changed(plan, **fields):
    return dataclasses.replace(plan, **fields)


def tables_with(plan, position, block_id):
    [tables] = plan.tables
    block_ids = array("i", tables.block_ids)
    block_ids[position] = block_id
    return (dataclasses.replace(tables, block_ids=block_ids),)


BAD_PLANS = {
    "too many tokens": lambda plan: changed(plan, token_ids=array("i", [0] * 65)),
    "too many requests": lambda plan: changed(plan, request_ids=tuple(f"x{index}" for index in range(9))),
    "a request twice": lambda plan: changed(plan, request_ids=(plan.request_ids[0],) * 2),
    "a request without tokens": lambda plan: changed(plan, query_offsets=array("i", [0, 0, len(plan.token_ids)])),
    "a token without a place": lambda plan: changed(plan, start_positions=array("i", [60, 60])),
    "a write into the null block": lambda plan: changed(plan, tables=tables_with(plan, 2, 0)),
    "a write into a cached block": lambda plan: changed(plan, tables=tables_with(plan, 2, plan.tables[0].block_ids[0])),
    "a write into a shared block": lambda plan: changed(plan, copies=()),
    "a block handed out twice": lambda plan: changed(plan, new_blocks=(plan.new_blocks[0],) * 2),
    "a destination that is not new": lambda plan: changed(plan, new_blocks=()),
    "a copy in a circle": lambda plan: changed(
        plan, copies=(*plan.copies, BlockCopy(source=plan.copies[0].destination, destination=plan.copies[0].source))
    ),
    "two copies into one block": lambda plan: changed(plan, copies=plan.copies * 2),
    "selected rows out of order": lambda plan: changed(plan, selected_rows=plan.selected_rows[::-1]),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_plan_is_noticed(name):
    rig, plan = copying_rig()
    check_plan(plan, rig.scheduler)
    bad = BAD_PLANS[name](plan)
    if name == "a write into a shared block":
        # As if the fork's copy had been forgotten: its block has two holders, and no copy explains the second.
        rig.paged.pool.blocks[plan.copies[0].destination].ref_count += 1
        bad = plan

    with pytest.raises(AssertionError):
        check_plan(bad, rig.scheduler)


def test_leak_is_noticed_when_idle():
    rig = running_rig()
    with pytest.raises(AssertionError, match="leaked"):
        check_idle(rig.paged)
    rig.run_to_end()
    check_idle(rig.paged)
