"""Who gets tokens in a step: decoding first, prompts in equal shares, newcomers without waiting for long prompts."""

import pytest

from octavo.core.events import RequestAdmitted, RequestDelayed, StepScheduled
from octavo.core.request import RequestStatus
from octavo.testing.factories import CoreSetup, Rig, num_scheduled, solo_output


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def long_rig(**setup):
    """Long prompts under a budget of 64; the shadow cache is not followed, which would cost minutes."""
    return Rig(
        CoreSetup(**{"block_size": 16, "num_blocks": 6_000, "max_model_len": 8_192, "max_num_seqs": 16, **setup}),
        choose=lambda row, history: len(history) % 7,
        is_checking=False,
    )


def test_chunks_cover_the_prompt_once_and_in_order():
    rig = Rig(CoreSetup(max_num_batched_tokens=16, max_num_seqs=2))
    request = rig.add(100, max_tokens=1)
    rig.run_to_end()

    assert rig.num_scheduled(request) == [16] * 6 + [4]
    assert [list(plan.start_positions) for plan in rig.plans] == [[16 * index] for index in range(7)]
    assert [bool(plan.samples) for plan in rig.plans] == [False] * 6 + [True]
    check_answers(rig, request)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_answer_does_not_depend_on_the_budget(chunk):
    rig = Rig(CoreSetup(max_num_batched_tokens=chunk, max_num_seqs=1))
    request = rig.add(50)
    rig.run_to_end()

    check_answers(rig, request)


def test_progress_does_not_depend_on_the_prefix_cache():
    """Caching off, a prompt of 300 under a budget of 64 and a pool just large enough (OPN-19)."""
    for is_caching in (False, True):
        rig = Rig(CoreSetup(block_size=16, num_blocks=20, max_model_len=320, is_caching=is_caching))
        request = rig.add(300)
        held = []
        while rig.scheduler.has_unfinished:
            plan = rig.schedule()
            held.append(rig.setup.num_blocks - rig.paged.num_free_blocks)
            assert held[-1] <= -(-(request.num_computed_tokens + num_scheduled(plan, request)) // 16)
            rig.commit(plan)
        assert rig.num_scheduled(request)[:5] == [64, 64, 64, 64, 44]
        check_answers(rig, request)


def test_decoding_request_gets_its_token_in_every_step():
    """A request decodes while prompts of 6,000 tokens keep arriving under a budget of 64 (OPN-20)."""
    rig = long_rig()
    decoding = rig.add(4, max_tokens=200)
    rig.step()
    for index in range(10):
        rig.add(range(10_000 * index, 10_000 * index + 6_000), max_tokens=1)
        rig.run(15)

    assert rig.num_scheduled(decoding)[1:] == [1] * 150


def test_short_prompt_answers_soon_while_long_ones_keep_arriving():
    """Its first token comes within 10 steps, although 6 prompts of 6,000 tokens run and 2 wait before it.

    Served one after the other, the long ones alone would take 94 steps each.
    """
    rig = long_rig()
    for index in range(6):
        rig.add(range(10_000 * index, 10_000 * index + 6_000), max_tokens=1)
        rig.run(3)
    for index in range(6, 8):
        rig.add(range(10_000 * index, 10_000 * index + 6_000), max_tokens=1)
    short = rig.add([5] * 10, max_tokens=1)
    num_steps = 0
    while short.num_output_tokens == 0:
        rig.step()
        num_steps += 1
        rig.add(range(10_000 * (10 + num_steps), 10_000 * (10 + num_steps) + 6_000), max_tokens=1)

    assert num_steps <= 10


def test_prompts_being_computed_share_the_budget_equally():
    """Three prompts, 60 tokens a step, a fourth seat free and nobody waiting for it."""
    rig = Rig(CoreSetup(max_num_batched_tokens=60, max_num_seqs=4, num_blocks=300))
    prompts = [rig.add(range(1_000 * index, 1_000 * index + 200)) for index in range(3)]
    rig.run(4)

    assert [num_scheduled(rig.plans[3], request) for request in prompts] == [20, 20, 20]


def test_newcomer_gets_a_share_of_its_first_step():
    rig = Rig(CoreSetup(max_num_batched_tokens=60, num_blocks=300))
    first = rig.add(200)
    rig.step()
    second = rig.add(range(1_000, 1_200))
    plan = rig.step()

    assert [num_scheduled(plan, request) for request in (first, second)] == [30, 30]


def test_no_share_is_left_where_no_seat_is_free():
    rig = Rig(CoreSetup(max_num_batched_tokens=60, max_num_seqs=2, num_blocks=300))
    rig.add([7], max_tokens=100)
    prompt = rig.add(range(1_000, 1_200))
    rig.step()
    rig.add(range(2_000, 2_200))
    handed_out = []
    grow = rig.paged.grow
    rig.paged.grow = lambda request, start, stop: (
        handed_out.append((request, stop - start)) or grow(request, start, stop)
    )
    rig.step()

    assert (prompt, 59) in handed_out, "in one piece, not as a share and the rest"


def test_share_that_nobody_takes_goes_to_the_prompts():
    """A newcomer that waits for blocks leaves its share; the prompt gets all of the budget."""
    rig = Rig(CoreSetup(max_num_batched_tokens=16, num_blocks=30))
    first = rig.add(100, max_tokens=4)
    rig.step()
    rig.add(range(200, 300), max_tokens=4)
    plan = rig.step()

    assert num_scheduled(plan, first) == plan.num_tokens == 16
    rig.run_to_end()


def test_waiting_requests_are_admitted_in_the_order_of_arrival():
    rig = Rig(CoreSetup(max_num_seqs=3, num_blocks=20))
    requests = [rig.add([10 * index + offset for offset in range(3 + index % 5)]) for index in range(12)]
    rig.run_to_end()

    first = [event.request_id for event in rig.of(RequestAdmitted) if not event.is_resumed]
    assert first == [request.request_id for request in requests]
    check_answers(rig, *requests)


def test_request_that_does_not_fit_is_not_overtaken_by_smaller_ones():
    """Head-of-line blocking on purpose: small requests that slip by would keep a large one waiting without bound."""
    rig = Rig(CoreSetup(num_blocks=10, max_num_seqs=8))
    rig.add(20, max_tokens=12)
    rig.step()
    large = rig.add(range(100, 130), max_tokens=4)
    small = [rig.add([60 + index], max_tokens=2) for index in range(4)]
    rig.run(5)

    assert large.wait_reason == "blocks"
    assert all(request.status is RequestStatus.WAITING for request in small)
    rig.run_to_end()
    admitted = [event.request_id for event in rig.of(RequestAdmitted) if not event.is_resumed]
    assert admitted.index(large.request_id) < admitted.index(small[0].request_id)


def test_reason_for_waiting_is_told_once():
    rig = Rig(CoreSetup(max_num_seqs=1))
    rig.add(4, max_tokens=10)
    waiting = rig.add([9])
    rig.run(6)

    assert [(event.request_id, event.reason) for event in rig.of(RequestDelayed)] == [(waiting.request_id, "seats")]
    rig.run_to_end()


def test_request_waits_for_tokens_when_the_budget_is_spent():
    rig = Rig(CoreSetup(max_num_batched_tokens=8))
    rig.add(8)
    waiting = rig.add([9])
    rig.step()

    assert [(event.request_id, event.reason) for event in rig.of(RequestDelayed)] == [(waiting.request_id, "tokens")]
    rig.run_to_end()


def test_long_queue_of_equal_prompts_is_not_searched_to_its_end():
    """At most as many as there are seats are looked at in vain in a step."""
    rig = Rig(CoreSetup(max_num_seqs=4, max_num_batched_tokens=8))
    rig.add(64, max_tokens=1)
    rig.step()
    for _ in range(50):
        rig.add(64, max_tokens=1)
    matched = []
    match = rig.paged.match
    rig.paged.match = lambda request: matched.append(request) or match(request)
    rig.step()

    assert len(matched) <= 4
    rig.run_to_end()


def test_every_seat_and_token_can_be_used():
    rig = Rig(CoreSetup(max_num_seqs=4, max_num_batched_tokens=4))
    requests = [rig.add([index], max_tokens=20) for index in range(9)]
    rig.run(10)

    assert rig.of(StepScheduled)[-1].num_running == 4
    assert rig.plans[-1].num_tokens == 4
    rig.run_to_end()
    check_answers(rig, *requests)


@pytest.mark.parametrize("max_num_batched_tokens", [5, 6, 7])
def test_smallest_budget_keeps_every_running_request_going(max_num_batched_tokens):
    """Five seats under a budget of five to seven: prompts and decoding ones each get at least a token a step."""
    rig = Rig(CoreSetup(max_num_seqs=5, max_num_batched_tokens=max_num_batched_tokens))
    requests = [rig.add(range(100 * index, 100 * index + 7 * index + 1), max_tokens=15) for index in range(9)]
    while rig.scheduler.has_unfinished:
        plan = rig.step()
        assert plan.num_tokens == max_num_batched_tokens or plan.num_requests == len(plan.request_ids)
        assert all(num_scheduled(plan, request) for request in requests if request.status is RequestStatus.RUNNING)
    check_answers(rig, *requests)


def test_step_without_requests_is_empty():
    rig = Rig()
    plan = rig.step()

    assert (plan.num_tokens, plan.num_requests) == (0, 0)
    assert rig.of(StepScheduled)[0].num_free_blocks == rig.setup.num_blocks


def test_steps_are_numbered_and_cannot_overlap():
    rig = Rig()
    rig.add(4)
    plan = rig.schedule()
    with pytest.raises(AssertionError, match="not been committed"):
        rig.scheduler.schedule()
    result = rig.runner.execute(plan)
    rig.scheduler.commit(plan, result)
    with pytest.raises(AssertionError, match="in flight"):
        rig.scheduler.commit(plan, result)

    assert [event.step for event in rig.of(StepScheduled)] == [0]
    assert rig.step().step == 1
