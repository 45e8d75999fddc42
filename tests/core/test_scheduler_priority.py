"""The priority policy: who runs first, who gives way, and who takes whose seat."""

from octavo.core.events import RequestAdmitted, RequestDelayed, RequestPreempted
from octavo.core.request import RequestStatus
from octavo.testing.factories import CoreSetup, Rig, solo_output


def priority_rig(**limits):
    return Rig(CoreSetup(**{"policy": "priority", **limits}))


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def test_urgent_request_is_admitted_before_earlier_ones():
    rig = priority_rig(max_num_seqs=1)
    requests = [rig.add(4, f"p{priority}", priority=priority) for priority in (2, 1, 0)]
    rig.run_to_end()

    assert [event.request_id for event in rig.of(RequestAdmitted)] == ["p0", "p1", "p2"]
    check_answers(rig, *requests)


def test_urgent_request_takes_the_seat_of_the_least_urgent():
    rig = priority_rig(max_num_seqs=2)
    normal, idle = rig.add(4, priority=1), rig.add([9] * 4, priority=5)
    rig.run(3)
    urgent = rig.add([8] * 4, priority=0)
    rig.step()

    assert idle.status is RequestStatus.WAITING
    assert {request.request_id for request in rig.scheduler.running} == {normal.request_id, urgent.request_id}
    [preempted] = rig.of(RequestPreempted)
    assert (preempted.request_id, preempted.reason) == (idle.request_id, "priority")
    assert preempted.for_request_id == urgent.request_id

    rig.run_to_end()
    check_answers(rig, normal, idle, urgent)


def test_equally_urgent_request_waits_for_a_seat():
    rig = priority_rig(max_num_seqs=1)
    rig.add(4, priority=1)
    rig.step()
    late = rig.add([9] * 4, priority=1)
    rig.step()

    assert late.status is RequestStatus.WAITING
    assert [(event.request_id, event.reason) for event in rig.of(RequestDelayed)] == [(late.request_id, "seats")]


def test_seat_is_taken_although_the_budget_of_the_step_is_spent():
    """The victim's own tokens come back with its seat.

    Two requests decode under a budget of two tokens: nothing was ever left for a third, however urgent.
    """
    rig = priority_rig(max_num_seqs=2, max_num_batched_tokens=2)
    rig.add(1, priority=1, max_tokens=50)
    idle = rig.add([9], priority=5, max_tokens=50)
    rig.run(3)
    urgent = rig.add([8], priority=0)
    plan = rig.step()

    assert plan.num_tokens == 2
    assert urgent.status is RequestStatus.RUNNING
    assert idle.status is RequestStatus.WAITING
    rig.run_to_end()


def test_seat_is_taken_from_a_long_prompt_that_uses_the_whole_budget():
    rig = priority_rig(max_num_seqs=1, max_num_batched_tokens=8, num_blocks=100)
    long = rig.add(100, priority=1)
    rig.run(2)
    urgent = rig.add([8] * 4, priority=0, max_tokens=1)
    plan = rig.step()

    assert plan.request_ids == (urgent.request_id,)
    rig.run_to_end()
    check_answers(rig, long, urgent)


def test_nobody_loses_a_seat_in_vain():
    """Blocks that others share do not come free with a victim, so a victim that frees too few keeps its seat.

    10 blocks: a prefix of 4 shared by two, one block of their own each, 4 free. The urgent request needs 6; the victim
    holds 5, but only 1 of them alone.
    """
    rig = priority_rig(max_num_seqs=2, num_blocks=10, block_size=4)
    shared = list(range(16))
    first = rig.add([*shared, 90], priority=1, max_tokens=3)
    rig.step()
    victim = rig.add([*shared, 91], priority=2, max_tokens=3)
    rig.step()
    assert victim.num_hit_tokens == 16
    urgent = rig.add(range(100, 122), priority=0, max_tokens=2)
    rig.step()

    assert not rig.of(RequestPreempted)
    assert [(event.request_id, event.reason) for event in rig.of(RequestDelayed)][-1] == (urgent.request_id, "blocks")
    rig.run_to_end()
    check_answers(rig, first, victim, urgent)


def test_victims_own_blocks_make_room_for_who_takes_its_seat():
    """6 blocks: the victim holds 5 of them, alone; 1 is free, the urgent request needs 5."""
    rig = priority_rig(max_num_seqs=1, num_blocks=6, block_size=4)
    victim = rig.add(17, priority=2, max_tokens=2)
    rig.step()
    urgent = rig.add(range(100, 118), priority=0, max_tokens=2)
    rig.step()

    assert victim.status is RequestStatus.WAITING
    assert urgent.status is RequestStatus.RUNNING
    rig.run_to_end()
    check_answers(rig, victim, urgent)


def test_urgent_request_may_hit_the_blocks_of_its_victim():
    """The 4 blocks it hits are the victim's, so they are no room for the 2 it needs besides: 6 of 6 blocks."""
    rig = priority_rig(max_num_seqs=1, num_blocks=6, block_size=4)
    victim = rig.add(17, priority=2, max_tokens=2)
    rig.run(1)
    urgent = rig.add([*range(16), *range(90, 96)], priority=0, max_tokens=2)
    rig.step()

    assert urgent.num_hit_tokens == 16
    assert victim.status is RequestStatus.WAITING
    rig.run_to_end()
    check_answers(rig, victim, urgent)


def test_second_newcomer_leaves_what_the_first_still_needs():
    """Both take a seat in one step; the first gets 7 of its 28 tokens, and the second must not get the rest's blocks.

    8 blocks: the first holds 2 and needs 5 more, 5 are free. The second needs 3, and its victim has only 1.
    """
    rig = priority_rig(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=8)
    victims = [rig.add([90 + index], priority=5, max_tokens=3) for index in range(2)]
    rig.step()
    first = rig.add(28, priority=0, max_tokens=1)
    second = rig.add(range(50, 60), priority=1, max_tokens=1)
    plan = rig.step()

    assert first.request_id in plan.request_ids
    assert second.wait_reason == "blocks"
    rig.run_to_end()
    assert all(event.reason == "priority" for event in rig.of(RequestPreempted))
    check_answers(rig, first, second, *victims)


def test_blocks_are_never_taken_from_a_more_urgent_request():
    rig = priority_rig(num_blocks=12, max_num_seqs=4)
    requests = [
        rig.add([10 * index + offset for offset in range(9)], priority=index % 3, max_tokens=15) for index in range(6)
    ]
    rig.run_to_end()

    rank = {request.request_id: (request.priority, request.arrival) for request in requests}
    preempted = rig.of(RequestPreempted)
    assert any(event.reason == "blocks" for event in preempted)
    assert all(rank[event.request_id] >= rank[event.for_request_id] for event in preempted)
    check_answers(rig, *requests)


def test_displacement_works_when_every_run_of_the_reserved_allocator_is_taken():
    rig = priority_rig(allocator="reserved", num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2)
    running = [rig.add(4, priority=1, max_tokens=9), rig.add([9] * 4, priority=2, max_tokens=9)]
    rig.step()
    urgent = rig.add([8] * 4, priority=0)
    rig.step()

    assert running[1].status is RequestStatus.WAITING
    assert urgent.status is RequestStatus.RUNNING
    rig.run_to_end()
    check_answers(rig, urgent, *running)
