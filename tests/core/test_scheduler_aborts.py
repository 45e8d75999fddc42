"""Requests that end early: in every state, while a step is in flight, and when a step fails."""

import pytest

from octavo.core.events import BlockCached, RequestFinished
from octavo.core.request import RequestStatus
from octavo.testing.factories import CoreSetup, Rig, solo_output


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def check_nothing_is_left(rig):
    assert not rig.scheduler.has_unfinished
    assert rig.scheduler.num_running == rig.scheduler.num_waiting == 0
    assert rig.paged.num_free_blocks == rig.setup.num_blocks
    assert not rig.paged._holdings
    assert not rig.paged._in_flight
    assert not rig.paged._num_copies_from


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_request_can_end_after_any_number_of_steps(num_steps, reason):
    """Waiting, in the middle of its prompt (8 tokens a step), at its first token, and later (OPN-25)."""
    rig = Rig(CoreSetup(max_num_batched_tokens=8))
    request = rig.add(30, max_tokens=20)
    rig.run(num_steps)

    assert rig.finish(request, reason)
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, reason)
    check_nothing_is_left(rig)
    [event] = rig.of(RequestFinished)
    assert (event.reason, event.num_output_tokens) == (reason, max(0, num_steps - 3))


def test_unknown_or_ended_request_cannot_be_finished():
    rig = Rig()
    request = rig.add(4)
    assert rig.finish(request)

    assert not rig.finish(request)
    assert len(rig.of(RequestFinished)) == 1


def test_waiting_request_that_is_aborted_is_never_admitted():
    rig = Rig(CoreSetup(max_num_seqs=1))
    first, second, third = (rig.add([index, 9], max_tokens=3) for index in range(3))
    rig.step()
    rig.finish(second)
    rig.run_to_end()

    assert not any(rig.num_scheduled(second))
    check_answers(rig, first, third)


def test_preempted_request_can_be_aborted():
    rig = Rig(CoreSetup(max_num_seqs=1, policy="priority"))
    displaced = rig.add(10, priority=1)
    rig.run(3)
    urgent = rig.add([9], priority=0)
    rig.step()
    assert displaced.status is RequestStatus.WAITING
    rig.finish(displaced)
    rig.run_to_end()

    [event, _] = rig.of(RequestFinished)
    assert (event.reason, event.num_output_tokens, event.num_preemptions) == ("abort", 3, 1)
    check_answers(rig, urgent)


def test_blocks_stay_until_the_step_in_flight_is_committed():
    """The step may be writing to them: handing them out at once would let two requests write to one block."""
    rig = Rig(CoreSetup(num_blocks=8))
    request = rig.add(10)
    plan = rig.schedule()
    num_free = rig.paged.num_free_blocks

    assert rig.finish(request)
    assert rig.paged.num_free_blocks == num_free
    assert not rig.of(RequestFinished)
    rig.commit(plan)
    check_nothing_is_left(rig)


def test_request_that_ends_by_itself_in_the_step_of_its_abort_ends_once():
    rig = Rig()
    request = rig.add(10, max_tokens=1)
    plan = rig.schedule()
    assert rig.finish(request)
    assert rig.finish(request)
    rig.commit(plan)

    [event] = rig.of(RequestFinished)
    assert event.reason == "length"


def test_request_that_arrives_during_a_step_runs_in_the_next():
    rig = Rig()
    first = rig.add(10)
    plan = rig.schedule()
    second = rig.add([9, 9])
    rig.commit(plan)

    assert rig.step().request_ids == (first.request_id, second.request_id)
    rig.run_to_end()
    check_answers(rig, first, second)


def test_abort_during_a_step_also_reaches_waiting_and_forking_requests():
    rig = Rig(CoreSetup(max_num_seqs=1, max_num_batched_tokens=4))
    lead, fork = rig.add_answers(10, 2)
    waiting = rig.add([9])
    plan = rig.schedule()
    for request in (waiting, fork):
        rig.finish(request)
    rig.commit(plan)

    assert {event.request_id for event in rig.of(RequestFinished)} == {waiting.request_id, fork.request_id}
    assert lead.forks == ()
    rig.run_to_end()
    check_answers(rig, lead)


def test_failed_step_ends_its_requests_and_spares_the_others():
    rig = Rig(CoreSetup(max_num_seqs=2))
    first, second, third = (rig.add([index, 8, 9], max_tokens=5) for index in range(3))
    rig.step()
    failed = rig.fail(rig.schedule())

    assert failed == [first.request_id, second.request_id]
    assert [event.reason for event in rig.of(RequestFinished)] == ["error", "error"]
    rig.run_to_end()
    check_answers(rig, third)


def test_tokens_of_a_failed_step_are_not_trusted():
    """What was computed before stays cached; the failed chunk and the tail it was to fill do not."""
    rig = Rig(CoreSetup(max_num_seqs=1, max_num_batched_tokens=6))
    rig.add(20)
    rig.step()
    rig.fail(rig.schedule())

    assert [event.num_tokens for event in rig.of(BlockCached)] == [4]
    again = rig.add(20)
    rig.run_to_end()
    assert again.num_hit_tokens == 4
    check_answers(rig, again)


def test_failed_step_lets_go_of_its_copies():
    rig = Rig()
    rig.add(range(3), max_tokens=1)
    rig.run_to_end()
    rig.add([0, 1, 2, 9, 9])
    plan = rig.schedule()
    assert plan.copies
    rig.fail(plan)

    check_nothing_is_left(rig)
    again = rig.add([0, 1, 2, 9, 9])
    rig.run_to_end()
    assert again.num_hit_tokens == 3, "the source is as good as before"
    check_answers(rig, again)


def test_abort_that_waited_for_a_failed_step_is_done():
    rig = Rig(CoreSetup(max_num_seqs=1))
    rig.add(4)
    waiting = rig.add([9])
    plan = rig.schedule()
    rig.finish(waiting)
    rig.fail(plan)

    assert [event.reason for event in rig.of(RequestFinished)] == ["error", "abort"]
    check_nothing_is_left(rig)


def test_fork_of_a_failed_lead_computes_the_prompt_itself():
    rig = Rig(CoreSetup(max_num_batched_tokens=8))
    _, fork = rig.add_answers(10, 2, temperature=1.0)
    rig.fail(rig.schedule())
    rig.run_to_end()

    check_answers(rig, fork)


@pytest.mark.parametrize("is_caching", [False, True])
def test_two_hundred_requests_of_every_kind_leave_a_whole_pool(is_caching):
    """A 3-level tree of prefixes, ends by length, stop id and end of sequence, aborts in between (OPN-05)."""
    for block_size in (16, 1):
        rig = Rig(
            CoreSetup(
                block_size=block_size,
                num_blocks=1_280 // block_size,
                is_caching=is_caching,
                vocab_size=50,
                max_num_seqs=12,
            ),
            is_checking=block_size == 16,
        )
        requests = []
        for index in range(200):
            prompt = [*range(20), *[index % 3] * 12, *[index % 7] * (index % 9)]
            requests.append(
                rig.add(
                    prompt, max_tokens=1 + index % 40, eos_token_ids=(7,), stop_token_ids=(8, 9) if index % 2 else ()
                )
            )
            if index % 4 == 0:
                rig.step()
            if index % 11 == 0:
                rig.finish(requests[index // 2])
        rig.run_to_end()

        check_nothing_is_left(rig)
        reasons = {event.reason for event in rig.of(RequestFinished)}
        assert reasons == {"stop", "length", "abort"}
        check_answers(rig, *(request for request in requests if request.finish_reason != "abort"))
        assert rig.scheduler.reset_prefix_cache()
        assert len(list(rig.paged.pool.free_blocks)) == rig.setup.num_blocks
