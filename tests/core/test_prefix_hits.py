"""The prefix cache through the scheduler: what hits, what must not, and what is computed only once."""

import random

import pytest

from octavo.core.block_hash import chain_hash
from octavo.core.events import (
    BlockCached,
    BlockEvicted,
    PrefixDiverged,
    RequestAdmitted,
    RequestDelayed,
    event_to_dict,
)
from octavo.core.kv_cache import GroupSpec
from octavo.testing.factories import CoreSetup, Rig, constant_hash, four_bit_hash, num_scheduled, solo_output


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def serve(rig, prompt, **how):
    """Run one request to its end and return it."""
    request = rig.add(prompt, **how)
    rig.run_to_end()
    check_answers(rig, request)
    return request


def rig_of_16(**setup):
    return Rig(CoreSetup(**{"block_size": 16, **setup}))


# ---- at least one token is always computed ----


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 31, 32, 33, 48])
def test_hit_never_covers_the_last_token(num_prompt):
    """Also when the prompt is an exact multiple of the block size and wholly cached (OPN-01)."""
    rig = rig_of_16()
    cold = serve(rig, num_prompt)
    warm = serve(rig, num_prompt)
    twins = [rig.add(num_prompt) for _ in range(2)]
    rig.run_to_end()

    assert cold.num_hit_tokens == 0
    assert warm.num_hit_tokens == num_prompt - 1
    assert [request.num_hit_tokens for request in twins] == [num_prompt - 1] * 2
    check_answers(rig, *twins)


def test_token_computed_again_does_not_write_into_a_shared_block():
    """The last token of a cached block is computed into a copy of the request's own."""
    rig = rig_of_16()
    serve(rig, 32)
    cached = {block.id for block in rig.paged.pool.blocks if block.key}
    rig.add(32)
    plan = rig.schedule()

    [table] = plan.tables
    assert table.block_ids[0] in cached
    assert table.block_ids[1] not in cached
    assert plan.copies[0].destination == table.block_ids[1]
    rig.commit(plan)


# ---- what separates contents ----


@pytest.mark.parametrize("position", range(32))
def test_changed_token_ends_the_hit_right_there(position):
    """Token-granular: the hit is not rounded down to a block. Block size 8, prompt 32 (OPN-07b)."""
    rig = Rig(CoreSetup(block_size=8))
    serve(rig, 32)
    changed = serve(rig, [*range(position), 999, *range(position + 1, 32)])

    assert changed.num_hit_tokens == position
    assert changed.num_hit_tokens // 8 <= position // 8


@pytest.mark.parametrize("cut", [1, 5, 15, 16, 17, 40, 63, 64, 65, 99])
def test_nothing_past_the_match_is_visible(cut):
    """B = A[:cut] + 5 others: the copied block holds A's tokens beyond the cut, and no row may read them (OPN-11)."""
    rig = rig_of_16()
    serve(rig, 100, max_tokens=16)
    follower = serve(rig, [*range(cut), *range(500, 505)], max_tokens=16)

    assert follower.num_hit_tokens == cut


def test_equal_blocks_after_different_parents_do_not_hit():
    rig = Rig(CoreSetup(block_size=8))
    serve(rig, [*range(8), *range(50, 58)], max_tokens=1)
    other = serve(rig, [*range(20, 28), *range(50, 58), 1], max_tokens=1)

    assert other.num_hit_tokens == 0


@pytest.mark.parametrize(
    "hash_function", [constant_hash, four_bit_hash, chain_hash], ids=["constant", "4 bits", "128 bits"]
)
def test_colliding_hashes_cost_hits_and_never_an_answer(hash_function):
    """Fifty prompts, twice, whose blocks share a hash or sixteen of them (OPN-07a)."""
    rig = Rig(CoreSetup(block_size=8, num_blocks=300, hash_function=hash_function))
    rng = random.Random(2)
    prompts = [[rng.randrange(4) for _ in range(32)] for _ in range(50)]
    num_hit_tokens = sum(serve(rig, prompt, max_tokens=4).num_hit_tokens for prompt in prompts * 2)

    num_full = 50 * 31
    assert num_hit_tokens >= num_full if hash_function is chain_hash else num_hit_tokens < 2 * num_full
    assert num_hit_tokens > 0


def test_tenants_share_nothing_with_each_other_and_everything_with_themselves():
    """The same prompt under salts a, a, b, none, none, "" (OPN-12)."""
    rig = rig_of_16()
    hits = [serve(rig, 512 - 300, salt=salt).num_hit_tokens for salt in ("a", "a", "b", None, None, "", "")]

    assert hits == [0, 211, 0, 0, 211, 0, 211]


# ---- what is cached, and when ----


def test_block_can_be_hit_only_once_it_is_computed():
    """Within the step that computes it, a block is announced and not named."""
    rig = rig_of_16(max_num_batched_tokens=16)
    rig.add(range(40))
    plan = rig.schedule()
    assert not rig.of(BlockCached)
    rig.commit(plan)
    assert [event.num_tokens for event in rig.of(BlockCached)] == [16]


@pytest.mark.parametrize("num_apart", [0, 1, 2])
def test_equal_prefix_is_computed_once_by_requests_that_arrive_together(num_apart):
    """Eight requests share 160 tokens; the first needs three chunks of 64, the others wait for them (OPN-08)."""
    rig = rig_of_16(max_num_batched_tokens=64, max_num_seqs=8)
    requests = []
    for index in range(8):
        requests.append(rig.add([*range(160), 1000 + index, 2000 + index]))
        rig.run(num_apart)
    rig.run_to_end()

    first = requests[0]
    assert sum(rig.num_scheduled(first)) == 162 + 7
    for request in requests[1:]:
        assert request.num_hit_tokens == 160
        assert sum(rig.num_scheduled(request)) == 2 + 7
    assert any(event.reason == "prefix" for event in rig.of(RequestDelayed)), "they really had to wait"
    check_answers(rig, *requests)


def test_request_waits_only_for_the_part_of_the_prefix_that_it_needs():
    """It shares 16 tokens with a prompt of 160: one chunk of waiting, not ten."""
    rig = rig_of_16(max_num_batched_tokens=16)
    rig.add(160, max_tokens=1)
    short = rig.add([*range(16), 900, 901], max_tokens=1)
    rig.run(3)

    assert short.num_hit_tokens == 16
    rig.run_to_end()
    check_answers(rig, short)


def test_request_stops_waiting_when_who_computes_its_prefix_is_gone():
    rig = rig_of_16(max_num_batched_tokens=16)
    first = rig.add(160)
    second = rig.add([*range(160), 900])
    rig.run(3)
    assert second.wait_reason == "prefix"
    num_computed = first.num_computed_tokens
    rig.finish(first)
    rig.run_to_end()

    assert second.num_hit_tokens == num_computed == 48
    check_answers(rig, second)


def test_those_behind_a_waiting_prefix_are_not_held_up():
    rig = rig_of_16(max_num_batched_tokens=32)
    rig.add(160)
    rig.add([*range(160), 900])
    other = rig.add([7, 8, 9])
    rig.run(2)

    assert other.num_output_tokens >= 1
    rig.run_to_end()


def test_second_turn_hits_prompt_and_answer():
    """All but the last token of the answer, which was sampled and never computed, and what the user adds."""
    rig = rig_of_16()
    first = serve(rig, 20, max_tokens=30)
    second = serve(rig, [*range(20), *rig.output(first), 700, 701])

    assert second.num_hit_tokens == 49


def test_tail_of_a_finished_request_is_copied_and_never_appended_to():
    """Two continuations of one tail each get a copy of their own; the tail itself stays as it was."""
    rig = rig_of_16()
    serve(rig, 20, max_tokens=1)
    tail = next(block for block in rig.paged.pool.blocks if block.num_keyed_tokens == 4)
    identity = tail.key.tokens
    requests = [rig.add([*range(20), 800 + index]) for index in range(2)]
    rig.run_to_end()

    assert [request.num_hit_tokens for request in requests] == [20, 20]
    assert (tail.key.tokens, tail.num_keyed_tokens) == (identity, 4)
    check_answers(rig, *requests)


def test_only_computed_tokens_of_a_tail_are_cached():
    """Aborted in the middle of a chunked prompt: 24 of 40 tokens were computed, 24 hit."""
    rig = rig_of_16(max_num_batched_tokens=24)
    first = rig.add(40)
    rig.step()
    rig.finish(first)

    assert serve(rig, 40).num_hit_tokens == 24


def test_best_of_several_continuations_is_copied():
    rig = rig_of_16()
    for tail in ([1, 2], [1, 2, 3, 4], [1, 2, 3]):
        serve(rig, [*range(100, 116), *tail, 90], max_tokens=1)
    hit = serve(rig, [*range(100, 116), 1, 2, 3, 4, 5])

    assert hit.num_hit_tokens == 20


def test_near_miss_is_told_with_its_position():
    rig = rig_of_16()
    serve(rig, 32, max_tokens=1)
    request = serve(rig, [*range(20), 999, *range(21, 32)])

    [event] = rig.of(PrefixDiverged)
    assert (event.request_id, event.position) == (request.request_id, 20)
    assert (event.token_id, event.cached_token_id) == (999, 20)
    assert set(event_to_dict(event)) == {"event", "request_id", "position", "block_id"}, "recordings have no token ids"


def test_near_miss_of_two_groups_names_a_position_where_tokens_differ():
    """One group's tail was evicted down to a shorter child: the divergence is the other group's (found by reading)."""
    rig = Rig(CoreSetup(block_size=4, groups=(GroupSpec(), GroupSpec())))
    serve(rig, [1, 2], max_tokens=1)
    serve(rig, [1, 2, 3, 4, 5], max_tokens=1)
    full = next(block for block in rig.paged.pool.indexes[1].blocks() if block.num_keyed_tokens == 4)
    rig.paged.pool._evict(full)
    request = serve(rig, [1, 2, 3, 9, 9])

    assert request.num_hit_tokens == 2
    [event] = rig.of(PrefixDiverged)
    assert event.position == 3


def test_copied_hit_is_given_up_when_its_source_would_take_the_last_block():
    """3 blocks: a cached tail and 2 free. The newcomer needs 3: it takes the tail's own block instead of copying it."""
    rig = Rig(CoreSetup(num_blocks=3))
    serve(rig, 3, max_tokens=1)
    request = serve(rig, [0, 1, 2, *range(50, 58)], max_tokens=1)

    assert request.num_hit_tokens == 0
    assert rig.of(BlockEvicted)


# ---- composition, pressure, counting ----


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_hits_and_misses_share_a_step(order):
    """A hit of 64, a miss of 74 and a prompt shorter than a block, in every order (OPN-09)."""
    rig = rig_of_16(max_num_batched_tokens=200)
    serve(rig, 64, max_tokens=1)
    prompts = [[*range(64), *range(300, 310)], list(range(400, 474)), [5, 6, 7, 8, 9]]
    requests = [rig.add(prompts[index]) for index in order]
    plan = rig.step()

    assert plan.num_requests == 3
    rig.run_to_end()
    assert [request.num_hit_tokens for request in requests] == [64 if index == 0 else 0 for index in order]
    check_answers(rig, *requests)


def test_evicted_content_is_a_full_miss():
    """4 blocks: B takes all that A had cached. A misses while B runs, and after (OPN-04)."""
    rig = Rig(CoreSetup(num_blocks=4, max_num_seqs=2))
    serve(rig, 12, max_tokens=1)
    serve(rig, range(100, 116), max_tokens=1)
    again = serve(rig, 12, max_tokens=1)

    assert again.num_hit_tokens == 0
    assert rig.of(BlockEvicted)


def test_refused_admission_changes_nothing_and_is_matched_anew():
    """12 blocks: 2 are cached, A holds 7 and grows into all 12 within 24 steps. C would hit the 2 and needs 5 more.

    It is refused in every one of these steps and must hold nothing meanwhile; when A has ended, nothing is left to hit,
    and C must not run with the hits of its first try (OPN-10).
    """
    rig = Rig(CoreSetup(num_blocks=12, max_num_seqs=4))
    serve(rig, 8, max_tokens=1)
    cached = [(block, block.key) for block in rig.paged.pool.blocks if block.key]
    rig.add(range(100, 125), max_tokens=24)
    rig.step()
    waiting = rig.add([*range(8), *range(200, 220)], max_tokens=2)
    for _ in range(22):
        rig.step()
        assert waiting.wait_reason == "blocks"
        assert all(block.ref_count == 0 for block, key in cached if block.key is key)
    assert len(rig.of(BlockEvicted)) >= 2, "the pressure happened"
    rig.run_to_end()

    assert waiting.num_hit_tokens == 0
    assert [event.reason for event in rig.of(RequestDelayed)] == ["blocks"], "told once, not 22 times"
    check_answers(rig, waiting)


def test_reset_tells_the_truth_and_forgets_everything():
    """OPN-13: refused while a request runs, complete when idle."""
    rig = rig_of_16()
    request = rig.add(40)
    rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    rig.run_to_end()
    check_answers(rig, request)

    assert rig.scheduler.reset_prefix_cache()
    assert serve(rig, 40).num_hit_tokens == 0
    assert serve(rig, 40).num_hit_tokens == 39


def test_reset_is_possible_while_requests_only_wait():
    rig = rig_of_16()
    serve(rig, 40, max_tokens=1)
    waiting = rig.add(40)

    assert rig.scheduler.reset_prefix_cache()
    rig.run_to_end()
    assert waiting.num_hit_tokens == 0


def test_hits_are_counted_once_per_request():
    """Unique prompts under constant preemption hit nothing of each other's; what a resumed request finds of its own
    is told apart, and its number stays the one of its first admission (OPN-14a, b, d)."""
    rig = Rig(CoreSetup(num_blocks=16, max_num_seqs=6))
    requests = [rig.add([1000 * index + offset for offset in range(12)], max_tokens=20) for index in range(100)]
    rig.run_to_end()

    admitted = rig.of(RequestAdmitted)
    first = [event for event in admitted if not event.is_resumed]
    resumed = [event for event in admitted if event.is_resumed]
    assert len(first) == 100
    assert len(resumed) == sum(request.num_preemptions for request in requests) > 20
    assert sum(event.num_block_hit_tokens + event.num_copied_hit_tokens for event in first) == 0
    assert sum(event.num_block_hit_tokens + event.num_copied_hit_tokens for event in resumed) > 0
    assert all(request.num_hit_tokens == 0 for request in requests)
    check_answers(rig, *requests)


def test_hit_is_not_limited_by_the_budget_of_a_step():
    """640 cached tokens hit in one admission under a budget of 64 (OPN-14c)."""
    rig = rig_of_16(num_blocks=100, max_model_len=1000)
    serve(rig, 640, max_tokens=1)
    request = serve(rig, [*range(640), *range(800, 810)])

    assert request.num_hit_tokens == 640
    assert num_scheduled(rig.plans[-request.num_output_tokens], request) == 10


def test_caching_disabled_names_nothing():
    rig = rig_of_16(is_caching=False)
    requests = [serve(rig, 40), serve(rig, 40)]

    assert [request.num_hit_tokens for request in requests] == [0, 0]
    assert not rig.of(BlockCached)
    assert rig.paged.pool.num_cached_blocks == 0


def test_cached_blocks_cost_no_capacity():
    """A request that needs the whole pool runs although every block is cached for somebody else."""
    rig = Rig(CoreSetup(num_blocks=8))
    for index in range(4):
        serve(rig, range(100 * index, 100 * index + 8), max_tokens=1)
    assert rig.paged.pool.num_cached_blocks == 8

    serve(rig, range(900, 931), max_tokens=1)


@pytest.mark.parametrize("num_prompt", [7, 8, 9, 30])
def test_scoring_request_fills_the_cache_and_does_not_read_it(num_prompt):
    rig = Rig()
    scoring = [serve(rig, num_prompt, prompt_logprobs=0, max_tokens=1) for _ in range(2)]
    reading = serve(rig, num_prompt)

    assert [request.num_hit_tokens for request in scoring] == [0, 0]
    assert reading.num_hit_tokens == num_prompt - 1
