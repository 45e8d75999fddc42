"""The fake runner finds what it is for: places that are stale, unwritten, foreign or gone."""

import dataclasses
from array import array

import pytest

from octavo.core.kv_cache import GroupSpec
from octavo.testing.factories import CoreSetup, Rig, constant_hash, make_request, solo_output, visible_history
from octavo.testing.fake_runner import FakeRunner, hashed_token


def plan_in_flight(**setup):
    rig = Rig(CoreSetup(**{"max_num_seqs": 1, "max_num_batched_tokens": 4, **setup}))
    rig.add(range(20, 32))
    rig.run(2)
    return rig, rig.schedule()


def with_block(plan, position, block_id):
    [tables] = plan.tables
    block_ids = array("i", tables.block_ids)
    block_ids[position] = block_id
    return dataclasses.replace(plan, tables=(dataclasses.replace(tables, block_ids=block_ids),))


@pytest.mark.parametrize(
    ("position", "block_id", "message"),
    [(0, 2, "holds position 4, not 0"), (0, 9, "unwritten"), (0, 0, "is gone"), (2, 0, "null block is written")],
    ids=["another block of its own", "never written", "null block read", "null block written"],
)
def test_wrong_block_in_a_table_is_found(position, block_id, message):
    rig, plan = plan_in_flight()
    with pytest.raises(AssertionError, match=message):
        rig.runner.execute(with_block(plan, position, block_id))


def test_new_block_is_poisoned():
    """Its old content must not look like the new one's, even at the same positions."""
    rig, plan = plan_in_flight()
    with pytest.raises(AssertionError, match="unwritten"):
        rig.runner.execute(dataclasses.replace(plan, new_blocks=(*plan.new_blocks, plan.tables[0].block_ids[0])))


def test_groups_that_disagree_are_found():
    rig = Rig(CoreSetup(groups=(GroupSpec(), GroupSpec()), max_num_seqs=1, max_num_batched_tokens=4))
    rig.add(range(20, 32))
    rig.step()
    plan = rig.schedule()
    rig.runner._places[1][plan.tables[1].block_ids[0]][2] = (99, 2)

    with pytest.raises(AssertionError, match="disagree"):
        rig.runner.execute(plan)


def test_foreign_tokens_change_the_answer():
    rig, _ = plan_in_flight()
    block_id = rig.plans[-1].tables[0].block_ids[0]
    rig.runner._places[0][block_id][1] = (99, 1)
    rig.commit(rig.plans[-1])
    request = rig.scheduler.running[0]
    rig.run_to_end()

    assert rig.output(request) != solo_output(request, rig.setup)[0]


def test_only_one_step_is_in_flight():
    rig, plan = plan_in_flight()
    rig.runner.submit(plan)
    with pytest.raises(AssertionError, match="in flight"):
        rig.runner.submit(plan)
    assert rig.runner.collect().step == plan.step
    with pytest.raises(AssertionError, match="no step"):
        rig.runner.collect()


def test_row_beyond_the_plan_is_an_error():
    _, plan = plan_in_flight()
    with pytest.raises(AssertionError, match="beyond"):
        FakeRunner._locate(plan, 99)


def test_token_depends_on_the_history_and_on_the_seed_unless_greedy():
    rig = Rig()
    rows = []
    for how in ({"seed": 1}, {"seed": 2}, {"seed": 1, "temperature": 1.0}, {"seed": 2, "temperature": 1.0}):
        rig.add([5], **how)
    plan = rig.schedule()
    rows = plan.samples
    choose = hashed_token(1_000_000)

    assert choose(rows[0], [5]) == choose(rows[1], [5]) != choose(rows[0], [6])
    assert len({choose(row, [5]) for row in rows}) == 3
    rig.commit(plan)


def test_banned_tokens_are_not_chosen():
    rig = Rig()
    rig.add([5], min_tokens=1, eos_token_ids=tuple(range(9)))
    plan = rig.schedule()

    assert hashed_token(10)(plan.samples[0], [5]) == 9
    rig.commit(plan)


def test_solo_output_ends_as_asked():
    """The oracle itself: stop ids, min_tokens and the length limit, against a choice that is easy to follow."""

    def choose(row, history):
        return next(token for token in (len(history), 0) if token not in row.banned_token_ids)

    setup = CoreSetup()
    cases = [
        ({"max_tokens": 3}, ([2, 3, 4], "length")),
        ({"max_tokens": 9, "stop_token_ids": (4,)}, ([2, 3, 4], "stop")),
        ({"max_tokens": 9, "eos_token_ids": (3,)}, ([2, 3], "stop")),
        ({"max_tokens": 4, "eos_token_ids": (3,), "ignore_eos": True}, ([2, 3, 4, 5], "length")),
        ({"max_tokens": 4, "eos_token_ids": (3,), "min_tokens": 2}, ([2, 0, 4, 5], "length")),
        ({"max_tokens": 0, "prompt_logprobs": 0}, ([], "length")),
    ]
    for how, expected in cases:
        assert solo_output(make_request([8, 9], **how), setup, choose) == expected
    unlimited = make_request([8, 9], max_tokens=None)
    unlimited.max_total_tokens = 4
    assert solo_output(unlimited, setup, choose) == ([2, 3], "length")


def test_history_outside_every_window_is_hidden():
    assert visible_history([1, 2, 3, 4], (GroupSpec(),)) == [1, 2, 3, 4]
    assert visible_history([1, 2, 3, 4], (GroupSpec(), GroupSpec(window=2))) == [1, 2, 3, 4]
    assert visible_history([1, 2, 3, 4], (GroupSpec(window=2), GroupSpec(window=3))) == [-1, 2, 3, 4]
    assert visible_history([1, 2], (GroupSpec(window=3),)) == [1, 2]


def test_constant_hash_is_constant():
    assert constant_hash(b"a", b"b") == constant_hash(b"", b"c")
