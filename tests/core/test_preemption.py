"""Preemption: who gives way, what it costs to come back, and that nothing is lost on the way."""

import pytest

from octavo.core.events import (
    BlockEvicted,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StepScheduled,
)
from octavo.core.kv_cache import GroupSpec
from octavo.testing.factories import CoreSetup, Rig, num_scheduled, solo_output


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


@pytest.mark.parametrize("is_caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("num_requests", [4, 64])
def test_requests_that_do_not_fit_together_all_finish(num_requests, is_caching):
    """7 blocks each in a pool of 14, four seats: two can run to their end (OPN-17)."""
    rig = Rig(
        CoreSetup(block_size=16, num_blocks=14, max_num_seqs=4, is_caching=is_caching),
        is_checking=num_requests == 4,
    )
    requests = [rig.add([100 * index + offset for offset in range(34)], max_tokens=64) for index in range(num_requests)]
    rig.run_to_end()

    preempted = rig.of(RequestPreempted)
    assert 0 < len(preempted) <= num_requests
    assert all(event.reason == "blocks" for event in preempted)
    assert [event.num_output_tokens for event in rig.of(RequestFinished)] == [64] * num_requests
    check_answers(rig, *requests)
    for request in requests:
        told = [update.token_id for update in rig.updates if update.request_id == request.request_id]
        assert told == rig.output(request), "tokens are delivered once and in order"


def test_last_arrival_gives_way():
    rig = Rig(CoreSetup(num_blocks=9, max_num_seqs=3))
    requests = [rig.add([10 * index + offset for offset in range(8)], max_tokens=12) for index in range(3)]
    rig.run(8)

    victims = [event.request_id for event in rig.of(RequestPreempted)]
    assert victims[0] == requests[2].request_id
    assert requests[0].request_id not in victims
    rig.run_to_end()
    check_answers(rig, *requests)


def test_victim_gives_its_tokens_of_the_step_back():
    """The less urgent one decodes first in the step, then loses its blocks to the other.

    Neither its tokens nor its blocks may be in the plan. 7 blocks: 3 of the victim, 4 of the urgent one, which needs a
    fifth in its fifth step.
    """
    rig = Rig(CoreSetup(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=8, policy="priority"))
    victim = rig.add(range(50, 56), priority=9, max_tokens=8)
    rig.step()
    urgent = rig.add(range(15), priority=0, max_tokens=8)
    rig.run(4)
    assert not rig.of(RequestPreempted)
    assert list(rig.paged.tables(victim)[0]) and rig.paged.num_free_blocks == 0
    plan = rig.schedule()

    [preempted] = rig.of(RequestPreempted)
    assert (preempted.request_id, preempted.for_request_id) == (victim.request_id, urgent.request_id)
    assert plan.request_ids == (urgent.request_id,)
    assert victim.num_computed_tokens == 0
    rig.commit(plan)
    rig.run_to_end()
    check_answers(rig, victim, urgent)


def test_victim_that_comes_later_in_the_step_is_passed_by():
    """Two prompts were promised 4 of 9 blocks each; the decoding request has outgrown the ninth. The first prompt takes
    the second's blocks, and when the second's turn comes in the same step it waits already.
    """
    rig = Rig(CoreSetup(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=5))
    decoding = rig.add(3, max_tokens=20)
    first, second = (rig.add(range(start, start + 16), max_tokens=2) for start in (100, 200))
    while not rig.of(RequestPreempted):
        assert second.num_uncomputed_tokens > 1, "it is still a prompt"
        plan = rig.step()

    [preempted] = rig.of(RequestPreempted)
    assert (preempted.request_id, preempted.for_request_id) == (second.request_id, first.request_id)
    assert plan.request_ids == (decoding.request_id, first.request_id)
    rig.run_to_end()
    check_answers(rig, decoding, first, second)


def test_nobody_is_admitted_in_a_step_that_ran_out_of_blocks():
    rig = Rig(CoreSetup(num_blocks=12, max_num_seqs=6))
    for index in range(12):
        rig.add([10 * index + offset for offset in range(8)], max_tokens=12)
    rig.run_to_end()

    num_steps_that_preempted, has_preempted = 0, False
    rig.counts()
    for event in rig.events:
        has_preempted |= isinstance(event, RequestPreempted)
        assert not (has_preempted and isinstance(event, RequestAdmitted))
        if isinstance(event, StepScheduled):
            num_steps_that_preempted += has_preempted
            has_preempted = False
    assert num_steps_that_preempted > 3


def test_resuming_costs_only_what_was_evicted():
    """The victim loses as many blocks as the other takes meanwhile, its deepest ones; the rest hits."""
    rig = Rig(CoreSetup(num_blocks=12, max_num_seqs=2, policy="priority"))
    victim = rig.add(18, priority=1, max_tokens=8)
    rig.run(2)
    urgent = rig.add(range(100, 121), priority=0, max_tokens=20)
    while victim.num_preemptions == 0:
        rig.step()
    keys = list(victim.keys)
    rig.run_to_end()

    [preempted] = rig.of(RequestPreempted)
    [resumed] = [event for event in rig.of(RequestAdmitted) if event.is_resumed]
    assert preempted.request_id == resumed.request_id == victim.request_id
    before = rig.events[: rig.events.index(resumed)]
    evicted = {event.hash for event in before if isinstance(event, BlockEvicted)}
    surviving = [key for key in keys[: preempted.num_computed_tokens // 4] if key.hash.hex() not in evicted]
    assert 0 < len(surviving) < preempted.num_computed_tokens // 4, "the pressure happened"
    assert surviving == keys[: len(surviving)]
    assert resumed.num_block_hit_tokens == 4 * len(surviving)
    check_answers(rig, victim, urgent)


def test_displaced_request_loses_nothing_while_there_is_room():
    """Seats, not blocks, were short: it comes back with all it had computed, the tail included."""
    rig = Rig(CoreSetup(max_num_seqs=1, policy="priority"))
    displaced = rig.add(10, priority=1, max_tokens=9)
    rig.run(4)
    num_computed = displaced.num_computed_tokens
    rig.add([9], priority=0, max_tokens=2)
    rig.run_to_end()

    [resumed] = [event for event in rig.of(RequestAdmitted) if event.is_resumed]
    assert resumed.num_block_hit_tokens + resumed.num_copied_hit_tokens == num_computed == 13
    check_answers(rig, displaced)


def test_resumed_request_schedules_exactly_what_it_lacks():
    """After the lookup, scheduled = known - computed, every time (OPN-18)."""
    rig = Rig(CoreSetup(block_size=16, num_blocks=60, max_num_seqs=64, max_num_batched_tokens=128, max_model_len=200))
    requests = [rig.add([*range(32), *range(100 * index, 100 * index + 20)], max_tokens=40) for index in range(1, 41)]
    num_resumed = 0
    while rig.scheduler.has_unfinished:
        plan = rig.schedule()
        for index, request_id in enumerate(plan.request_ids):
            request = next(one for one in rig.scheduler.running if one.request_id == request_id)
            num_tokens = plan.query_offsets[index + 1] - plan.query_offsets[index]
            assert plan.start_positions[index] == request.num_computed_tokens
            assert 0 < num_tokens <= request.num_uncomputed_tokens
            num_resumed += request.num_preemptions > 0
        assert plan.num_tokens <= 128
        rig.commit(plan)

    assert num_resumed > 0
    assert rig.of(RequestPreempted)
    check_answers(rig, *requests)


@pytest.mark.parametrize("groups", [(GroupSpec(), GroupSpec()), (GroupSpec(), GroupSpec(window=9))])
def test_preemption_works_over_several_groups(groups):
    rig = Rig(CoreSetup(num_blocks=24, groups=groups, max_num_seqs=6))
    requests = [rig.add([10 * index + offset for offset in range(8)], max_tokens=20) for index in range(12)]
    rig.run_to_end()

    assert len(rig.of(RequestPreempted)) > 0
    check_answers(rig, *requests)


def test_watermark_spares_preemptions():
    """The same load, with and without a fifth of the pool kept free at admission."""
    num_preemptions = {}
    for watermark_ratio in (0.0, 0.2):
        rig = Rig(CoreSetup(num_blocks=20, max_num_seqs=8, watermark_ratio=watermark_ratio))
        requests = [rig.add([10 * index + offset for offset in range(7)], max_tokens=20) for index in range(20)]
        rig.run_to_end()
        num_preemptions[watermark_ratio] = len(rig.of(RequestPreempted))
        check_answers(rig, *requests)

    assert num_preemptions[0.2] < num_preemptions[0.0]


def test_watermark_is_waived_when_nothing_runs():
    """A request that needs the whole pool runs, whatever the watermark."""
    rig = Rig(CoreSetup(num_blocks=8, watermark_ratio=0.9))
    request = rig.add(24, max_tokens=9)
    rig.run_to_end()

    assert not rig.of(RequestPreempted)
    check_answers(rig, request)


def test_blocks_that_running_prompts_still_need_are_not_promised_twice():
    """20 blocks. A prompt of 60 tokens (15 blocks) is computed 8 tokens a step; a second of 40 would take its blocks.

    Without counting what is outstanding the second is admitted into blocks that the first then lacks: it is preempted,
    admitted again, preempted again.
    """
    rig = Rig(CoreSetup(num_blocks=20, max_num_batched_tokens=8))
    first = rig.add(60, max_tokens=2)
    rig.step()
    second = rig.add(range(100, 140), max_tokens=2)
    rig.step()
    assert second.wait_reason == "blocks"
    rig.run_to_end()

    assert not rig.of(RequestPreempted)
    assert rig.num_scheduled(first) == [8] * 7 + [4, 1] + [0] * (len(rig.plans) - 9)
    check_answers(rig, first, second)


def test_alone_every_accepted_request_finishes():
    """Whatever fits alone must finish in company: each of these may fill the pool (invariant 48)."""
    rig = Rig(CoreSetup(num_blocks=6, max_num_seqs=6, max_num_batched_tokens=12))
    requests = [
        rig.add([10 * index + offset for offset in range(3 * index + 1)], max_tokens=None) for index in range(8)
    ]
    rig.run_to_end()

    assert all(request.num_known_tokens == 25 for request in requests)
    assert rig.of(RequestPreempted)
    check_answers(rig, *requests)


def test_preempted_request_scores_its_prompt_only_once():
    """Preempted half-way through its prompt, it computes the rows again whose tokens were scored before."""
    rig = Rig(CoreSetup(max_num_seqs=1, max_num_batched_tokens=8, policy="priority"))
    scoring = rig.add(30, priority=1, prompt_logprobs=0, max_tokens=3)
    rig.run(2)
    rig.add([9], priority=0, max_tokens=2)
    rig.run_to_end()

    assert scoring.num_preemptions == 1
    scored = [
        score.token_id
        for update in rig.updates
        if update.request_id == scoring.request_id
        for score in update.prompt_logprobs
    ]
    assert scored == list(range(1, 30))
    assert sum(num_scheduled(plan, scoring) for plan in rig.plans) == 16 + 30 + 2
    check_answers(rig, scoring)
