"""A StepPlan as arrays, and the plans that are refused because a row would go to the wrong place."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from octavo.runtime.step_inputs import read_step_inputs
from octavo.testing.hand_plans import Chunk, make_plan


def read(plan, *, block_size=4, num_blocks=9):
    return read_step_inputs(plan, block_size=block_size, num_blocks=num_blocks)


def test_rows_find_their_positions_and_slots():
    plan = make_plan(
        [
            Chunk("a", [10, 11, 12], start=3, tables=[[5, 2], [1, 8]]),
            Chunk("b", [20], start=0, tables=[[7], [9]]),
            Chunk("c", [30, 31], start=8, tables=[[0, 0, 3], [0, 6, 4]], sample=None),
        ]
    )

    inputs = read(plan)

    assert inputs.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert inputs.positions.tolist() == [3, 4, 5, 0, 8, 9]
    assert inputs.slot_places.tolist() == [3, 0, 1, 0, 0, 1]
    assert [ids.tolist() for ids in inputs.slot_block_ids] == [[5, 2, 2, 7, 3, 3], [1, 8, 8, 9, 4, 4]]
    assert [(one.rows.start, one.rows.stop, one.context_length) for one in inputs.requests] == [
        (0, 3, 6),
        (3, 4, 1),
        (4, 6, 10),
    ]
    assert inputs.selected_rows.tolist() == [2, 3]


def test_a_plan_may_come_from_another_process():
    plan = make_plan([Chunk("a", [1, 2, 3], tables=[[4]])])

    assert read(pickle.loads(pickle.dumps(plan))).positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk("a", [1, 2], start=3, tables=[[5]])], "a: table ends before its rows"),
        ([Chunk("a", [1], start=4, tables=[[5, 0]])], "null block is never written"),
        ([Chunk("a", [1], tables=[[10]])], "block that does not exist"),
        ([Chunk("a", [1], tables=[[-1]])], "block that does not exist"),
        ([Chunk("a", [1], tables=[[3]]), Chunk("b", [2], tables=[[3]])], "two rows of a step go to the same slot"),
    ],
    ids=["short table", "null block", "beyond the pool", "negative id", "shared slot"],
)
def test_rows_without_a_slot_of_their_own_are_a_bug(chunks, message):
    with pytest.raises(AssertionError, match=message):
        read(make_plan(chunks))


def test_selected_rows_ascend():
    plan = make_plan([Chunk("a", [1, 2, 3], tables=[[4]], targets=[2, 3])])

    assert read(plan).selected_rows.tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="ascend"):
        read(replace(plan, selected_rows=plan.selected_rows[::-1]))
