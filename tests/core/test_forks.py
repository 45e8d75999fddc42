"""Several answers to one prompt: shared blocks, copy-on-write, and answers that find no seat or no block."""

import pytest

from octavo.core.events import BlockCached, BlockCopied, RequestFinished, RequestForked, RequestPreempted
from octavo.core.kv_cache import GroupSpec
from octavo.core.request import RequestStatus
from octavo.errors import InvalidParameterError
from octavo.testing.factories import CoreSetup, Rig, make_request, solo_output

BS = 4


def check_answers(rig, answers):
    for request in answers:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


@pytest.mark.parametrize("num_blocks", [64, 7], ids=["roomy", "room for one"])
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 20, 31, 33])
def test_four_answers_equal_four_single_requests(num_prompt, num_blocks):
    """Block size 16; of 7 blocks one answer of 33 + 40 tokens uses 5, so answers wait or start over (OPN-15)."""
    rig = Rig(CoreSetup(num_blocks=num_blocks, block_size=16, max_num_seqs=4))
    answers = rig.add_answers(num_prompt, 4, temperature=1.0, seed=7, max_tokens=40)
    rig.run_to_end()

    check_answers(rig, answers)
    assert len({tuple(rig.output(request)) for request in answers}) == 4
    assert len(rig.of(RequestForked)) == 3
    assert bool(rig.of(RequestPreempted)) == (num_blocks == 7)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_n_answers_cost_n_minus_one_copies(n):
    """The prompt fills 2 blocks and 1 token: the last answer to write goes on in the shared block."""
    rig = Rig(CoreSetup(max_num_seqs=8))
    answers = rig.add_answers(2 * BS + 1, n, max_tokens=2)
    rig.run(2)

    copied = rig.of(BlockCopied)
    assert len(copied) == n - 1
    assert len({event.source for event in copied}) == 1
    assert rig.plans[-1].num_tokens == n
    in_tables = [table[-1] for request in rig.scheduler.running for table in rig.paged.tables(request)]
    assert len(set(in_tables)) == len(in_tables)
    rig.run_to_end()
    check_answers(rig, answers)


def test_full_blocks_need_no_copy():
    rig = Rig()
    answers = rig.add_answers(2 * BS, 4, max_tokens=3)
    rig.step()
    assert rig.setup.num_blocks - rig.paged.num_free_blocks == 2, "four answers hold the prompt's two blocks"
    rig.run_to_end()

    assert not rig.of(BlockCopied)
    check_answers(rig, answers)


def test_source_of_a_copy_is_held_until_the_step_is_committed():
    """Between `schedule` and `commit` nobody may get the source, although no table holds it."""
    rig = Rig()
    rig.add(range(3), max_tokens=1)
    rig.run_to_end()
    rig.add([0, 1, 2, 9, 9], max_tokens=1)
    plan = rig.schedule()
    [copy] = plan.copies
    source = rig.paged.pool.blocks[copy.source]

    assert (source.ref_count, source.num_keyed_tokens) == (1, 3)
    assert all(copy.source not in table for request in rig.scheduler.running for table in rig.paged.tables(request))
    rig.commit(plan)
    assert source.ref_count == 0
    assert source.key is not None, "the source can be found again"


def test_destination_of_a_copy_starts_without_a_name():
    rig = Rig()
    rig.add(range(3), max_tokens=1)
    rig.run_to_end()
    rig.add([0, 1, 2, 9, 9], max_tokens=1)
    plan = rig.schedule()
    destination = rig.paged.pool.blocks[plan.copies[0].destination]

    assert (destination.ref_count, destination.key) == (1, None)
    assert destination.id in plan.new_blocks
    rig.commit(plan)


def test_victim_whose_copy_was_never_made_does_not_cache_it():
    """Three answers share a half-filled tail: two copy it, the third writes in place. Two urgent requests take seats.

    The second victim has its copy decided in this very step and never made. If it were named, the next request would
    read places that nobody wrote: the victim itself, when it comes back.
    """
    rig = Rig(CoreSetup(max_num_seqs=3, policy="priority"))
    answers = rig.add_answers(BS + 2, 3, temperature=1.0, priority=5, max_tokens=6)
    rig.step()
    urgent = [rig.add([50 + index], priority=0, max_tokens=4) for index in range(2)]
    plan = rig.schedule()

    assert [event.request_id for event in rig.of(RequestPreempted)] == [answers[2].request_id, answers[1].request_id]
    [copy] = plan.copies
    assert {event.destination for event in rig.of(BlockCopied)} > {copy.destination}, "a copy was dropped"
    assert all(event.num_tokens == BS for event in rig.of(BlockCached))
    rig.commit(plan)
    rig.run_to_end()
    check_answers(rig, [*urgent, *answers])


def test_answers_without_a_seat_wait_and_find_their_prompt():
    """Two seats for four answers: the third and fourth wait, then hit the prompt's full blocks."""
    rig = Rig(CoreSetup(max_num_seqs=2))
    answers = rig.add_answers(2 * BS + 2, 4, temperature=1.0, max_tokens=5)
    rig.step()

    assert [request.status for request in answers] == [RequestStatus.RUNNING] * 2 + [RequestStatus.WAITING] * 2
    assert [request.num_output_tokens for request in answers] == [1] * 4, "their first tokens are sampled together"
    rig.run_to_end()
    check_answers(rig, answers)


def test_answer_without_a_seat_may_end_with_its_first_token():
    rig = Rig(CoreSetup(max_num_seqs=1))
    answers = rig.add_answers(5, 3, max_tokens=1)
    rig.step()

    assert not rig.scheduler.has_unfinished
    check_answers(rig, answers)


def test_lead_that_ends_first_leaves_its_forks_alone():
    """Greedy answers with different limits: the lead's single token must not take the others with it."""
    rig = Rig()
    prompt = range(6)
    lead = make_request(prompt, "lead", max_tokens=1)
    fork = make_request(prompt, "fork", max_tokens=9, seed=1)
    rig.scheduler.add(lead, [fork])
    rig.run_to_end()

    check_answers(rig, [lead, fork])


@pytest.mark.parametrize("moment", ["waiting", "in flight", "after the first token", "later"])
def test_aborting_the_lead_leaves_the_other_answers_complete(moment):
    rig = Rig(CoreSetup(max_num_batched_tokens=8))
    answers = rig.add_answers(20, 3, temperature=1.0, max_tokens=6)
    if moment == "waiting":
        rig.finish(answers[0])
    elif moment == "in flight":
        plan = rig.schedule()
        rig.finish(answers[0])
        rig.commit(plan)
    else:
        rig.run(3 if moment == "after the first token" else 5)
        rig.finish(answers[0])
    rig.run_to_end()

    assert answers[0].finish_reason == "abort"
    check_answers(rig, answers[1:])


def test_aborting_a_fork_before_it_has_a_token_of_its_own():
    rig = Rig(CoreSetup(max_num_batched_tokens=8))
    answers = rig.add_answers(20, 3, temperature=1.0, max_tokens=6)
    rig.step()
    rig.finish(answers[1])
    assert answers[0].forks == (answers[2],)
    rig.run_to_end()

    assert (answers[1].num_output_tokens, answers[1].finish_reason) == (0, "abort")
    check_answers(rig, [answers[0], answers[2]])


def test_all_answers_can_be_aborted_at_any_step_without_a_trace():
    """Fifty requests of four answers, aborted after 0 .. 9 steps: every answer ends exactly once (OPN-16)."""
    rig = Rig(CoreSetup(num_blocks=40, max_num_seqs=4))
    for round_number in range(50):
        answers = rig.add_answers(10, 4, temperature=1.0, max_tokens=60, stop_token_ids=(5,))
        rig.run(round_number % 10)
        for request in answers:
            rig.finish(request)
        assert not rig.scheduler.has_unfinished
        assert rig.paged.num_free_blocks == 40
        assert not rig.scheduler._leads
        assert not rig.paged._holdings
        assert not rig.paged._in_flight
        assert not rig.paged._num_copies_from
    assert len(rig.of(RequestFinished)) == 200


def test_forks_share_under_a_window_too():
    rig = Rig(CoreSetup(groups=(GroupSpec(), GroupSpec(window=6))))
    answers = rig.add_answers(18, 4, temperature=1.0, max_tokens=12)
    rig.run_to_end()

    assert len(rig.of(BlockCopied)) == 2 * 3, "each group copies its tail for three of four"
    check_answers(rig, answers)


def test_answers_keep_their_own_penalty_history():
    """What one answer said must not count against another."""
    rig = Rig()
    rig.add_answers(6, 2, temperature=1.0, max_tokens=4, presence_penalty=1.0)
    rig.run(3)
    first, second = rig.plans[-1].samples

    assert first.output_token_ids != second.output_token_ids
    assert list(first.prompt_token_ids) == list(second.prompt_token_ids) == list(range(6))
    assert (first.seed, second.seed) == (0, 1)


def test_prompt_is_scored_once_for_all_answers():
    """Also for answers that had to wait for a seat and compute the prompt again: they used to score it again."""
    rig = Rig(CoreSetup(max_num_seqs=1))
    answers = rig.add_answers(6, 3, prompt_logprobs=0, max_tokens=3, temperature=1.0)
    rig.run_to_end()

    scored = [update for update in rig.updates if update.prompt_logprobs]
    assert [update.request_id for update in scored] == [answers[0].request_id]
    assert [score.token_id for score in scored[0].prompt_logprobs] == [1, 2, 3, 4, 5]
    check_answers(rig, answers)


def test_ids_of_the_answers_must_differ():
    rig = Rig()
    with pytest.raises(InvalidParameterError, match="in use"):
        rig.scheduler.add(make_request(4, "same"), [make_request(4, "same")])
    with pytest.raises(InvalidParameterError, match="in use"):
        rig.scheduler.add(make_request(4, "lead"), [make_request(4, "same"), make_request(4, "same")])

    assert not rig.scheduler.has_unfinished
    assert rig.of(RequestFinished) == []
