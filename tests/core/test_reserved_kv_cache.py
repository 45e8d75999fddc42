"""The reserved allocator: the baseline that paging is measured against, behind the same scheduler."""

import pytest

from octavo.core.events import BlocksAllocated, BlocksReleased, EventLog, RequestAdmitted, RequestForked, StepScheduled
from octavo.core.kv_cache import GroupSpec
from octavo.core.reserved_kv_cache import ReservedKVCache
from octavo.testing.factories import CoreSetup, Rig, make_request, solo_output


def reserved_rig(**setup):
    return Rig(CoreSetup(**{"allocator": "reserved", "num_blocks": 32, "max_model_len": 32, **setup}))


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def test_request_takes_one_contiguous_run_and_gives_it_back():
    rig = reserved_rig()
    request = rig.add(5)
    plan = rig.step()

    assert list(plan.tables[0].block_ids) == list(range(1, 9))
    assert rig.scheduler.kv_cache.num_free_blocks == 24
    assert rig.scheduler.kv_cache.num_held_blocks(request) == 8
    rig.run_to_end()
    [allocated], [released] = rig.of(BlocksAllocated), rig.of(BlocksReleased)
    assert allocated.block_ids == released.block_ids == tuple(range(1, 9))
    check_answers(rig, request)


def test_blocks_of_a_run_are_new_in_its_first_step_only():
    """The runner poisons new blocks; poisoning them again would destroy what was computed."""
    rig = reserved_rig(max_num_batched_tokens=8)
    rig.add(20)
    plans = rig.run(3)

    assert [len(plan.new_blocks) for plan in plans] == [8, 0, 0]


def test_number_of_running_requests_is_the_number_of_runs():
    """Four runs of 32 tokens; requests of 5 tokens would fit 16 times into the same memory when paged."""
    num_running = {}
    for allocator in ("reserved", "paged"):
        rig = reserved_rig(allocator=allocator, max_num_seqs=16)
        requests = [rig.add([index, 1, 2, 3, 4], max_tokens=4) for index in range(16)]
        rig.run_to_end()
        num_running[allocator] = max(event.num_running for event in rig.of(StepScheduled))
        check_answers(rig, *requests)

    assert num_running == {"reserved": 4, "paged": 16}


def test_most_of_a_run_is_never_written():
    rig = reserved_rig()
    rig.add(5, max_tokens=3)
    rig.run_to_end()

    assert [event.num_filled_places for event in rig.of(StepScheduled)] == [5, 6, 7]
    assert all(event.num_usable_blocks - event.num_free_blocks == 8 for event in rig.of(StepScheduled))


def test_rest_of_the_pool_that_holds_no_whole_run_stays_unused():
    rig = reserved_rig(num_blocks=15)
    rig.add(5)
    rig.add([9])
    rig.step()

    assert rig.scheduler.num_running == 1
    assert rig.scheduler.kv_cache.num_free_blocks == 7
    rig.run_to_end()


def test_runs_are_reused():
    rig = reserved_rig(num_blocks=8)
    requests = [rig.add([index, 1]) for index in range(3)]
    rig.run_to_end()

    assert [event.block_ids[0] for event in rig.of(BlocksAllocated)] == [1, 1, 1]
    check_answers(rig, *requests)


def test_nothing_is_shared_or_cached():
    rig = reserved_rig()
    first, second = rig.add(20), rig.add(20)
    rig.run_to_end()
    third = rig.add(20)
    rig.run_to_end()

    assert [request.num_hit_tokens for request in (first, second, third)] == [0, 0, 0]
    assert rig.scheduler.reset_prefix_cache()
    check_answers(rig, first, second, third)


def test_reset_is_refused_while_a_run_is_taken():
    rig = reserved_rig()
    rig.add(5)
    rig.step()

    assert not rig.scheduler.reset_prefix_cache()
    rig.run_to_end()


def test_further_answers_start_from_scratch():
    rig = reserved_rig()
    answers = rig.add_answers(6, 3, temperature=1.0, max_tokens=5)
    rig.run_to_end()

    assert not rig.of(RequestForked)
    assert len(rig.of(RequestAdmitted)) == 3
    check_answers(rig, *answers)


def test_displaced_request_computes_everything_again():
    rig = reserved_rig(max_num_seqs=1, policy="priority")
    displaced = rig.add(10, priority=1)
    rig.run(3)
    rig.add([9], priority=0)
    rig.run_to_end()

    assert sum(rig.num_scheduled(displaced)) == 12 + 13 + 4
    check_answers(rig, displaced)


def test_groups_have_runs_of_their_own():
    rig = reserved_rig(groups=(GroupSpec(), GroupSpec(window=5)), num_blocks=33)
    requests = [rig.add([index] * 9, max_tokens=20) for index in range(3)]
    plan = rig.step()

    assert [list(tables.block_ids[:8]) for tables in plan.tables] == [list(range(1, 9)), list(range(9, 17))]
    rig.run_to_end()
    check_answers(rig, *requests)


def test_run_is_never_outgrown():
    kv = ReservedKVCache(8, 4, max_model_len=16, events=EventLog())
    request = make_request(5)
    kv.admit(request, kv.match(request))

    assert kv.grow(request, 0, 16)
    with pytest.raises(AssertionError, match="longer than its run"):
        kv.grow(request, 16, 17)
