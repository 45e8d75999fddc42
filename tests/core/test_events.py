"""Events: plain values in order, enough to tell what happened, never read back."""

import json
import typing

import pytest

from octavo.core.budget import StepBudget
from octavo.core.events import (
    BlockCopied,
    BlocksAllocated,
    Event,
    EventLog,
    RequestArrived,
    StepScheduled,
    event_to_dict,
)
from octavo.testing.factories import CoreSetup, Rig


def test_log_is_emptied_by_reading_it():
    log = EventLog()
    first, second = (RequestArrived(request_id=name, num_prompt_tokens=1, max_total_tokens=2) for name in "ab")
    log.emit(first)
    log.emit(second)

    assert log.drain() == [first, second]
    assert log.drain() == []


def test_event_is_json_with_its_kind():
    event = BlocksAllocated(request_id="r", group=0, block_ids=(1, 2))

    assert json.loads(json.dumps(event_to_dict(event))) == {
        "event": "BlocksAllocated",
        "request_id": "r",
        "group": 0,
        "block_ids": [1, 2],
    }


def test_kinds_have_names_of_their_own():
    kinds = typing.get_args(Event)

    assert len({kind.__name__ for kind in kinds}) == len(kinds) == 15


def test_usage_is_between_zero_and_one_and_zero_when_idle():
    rig = Rig(CoreSetup(num_blocks=9))
    for index in range(6):
        rig.add([index] * 9, max_tokens=9)
    rig.run_to_end()
    rig.step()
    steps = rig.of(StepScheduled)

    assert all(0 <= event.num_free_blocks <= event.num_usable_blocks == 9 for event in steps)
    assert min(event.num_free_blocks for event in steps) == 0
    assert steps[-1].num_free_blocks == 9
    assert (steps[-1].num_running, steps[-1].num_waiting) == (0, 0)


def test_filled_places_count_shared_ones_once():
    """A prompt of 10 in blocks of 4, then four answers: blocks 0 and 1 shared, four tails of 3 tokens."""
    rig = Rig()
    rig.add_answers(10, 4, temperature=1.0)
    rig.run(2)

    assert [event.num_filled_places for event in rig.of(StepScheduled)] == [10, 8 + 4 * 3]
    rig.run_to_end()


def test_filled_places_count_a_copied_source_as_far_as_it_is_filled():
    """A partial block that nobody holds is kept for one step while it is copied: 2 of its 4 places are filled."""
    rig = Rig()
    rig.add(5, max_tokens=2)
    rig.run_to_end()
    assert len(rig.of(BlockCopied)) == 0
    rig.add([0, 1, 2, 3, 4, 90], max_tokens=2)
    rig.step()

    assert len(rig.of(BlockCopied)) == 1
    # The hit block and the copy's six tokens, and the six tokens in the source's own two places.
    assert rig.of(StepScheduled)[-1].num_filled_places == 4 + 2 + 2
    rig.run_to_end()


def test_budget_cannot_be_overspent():
    budget = StepBudget(5)
    budget.spend(3)
    assert budget.num_tokens_left == 2
    budget.refund(2)
    budget.spend(4)
    for num_tokens in (0, 1, -1):
        with pytest.raises(AssertionError):
            budget.spend(num_tokens)
    assert budget.num_tokens_left == 0
