"""Sinks before a window: the first blocks stay, a gap opens behind them, and a hit needs both sides of it."""

import pytest

from octavo.core.events import BlocksReleased, RequestForked, RequestPreempted
from octavo.core.kv_cache import GroupSpec
from octavo.core.step import NULL_BLOCK
from octavo.testing.factories import CoreSetup, Rig, make_request, solo_output


def sink_rig(window, num_sinks, **setup):
    return Rig(CoreSetup(**{"groups": (GroupSpec(window=window, num_sinks=num_sinks),), **setup}))


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def live(rig, request):
    return [index for index, block in enumerate(rig.paged.tables(request)[0]) if block != NULL_BLOCK]


def wanted(*ranges):
    return {make_request(ids).content.identity(0, len(ids)) for ids in ranges}


def evict(rig, *ranges):
    for block in rig.paged.pool.blocks:
        if block.key and block.key.tokens in wanted(*ranges):
            rig.paged.pool._evict(block)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("num_prompt", [7, 11, 12, 13, 16, 17, 40])
@pytest.mark.parametrize("num_sinks", [1, 4, 6, 11])
def test_answer_does_not_depend_on_chunks_and_freed_blocks(num_sinks, num_prompt, chunk):
    """Window 8, blocks of 4: the shadow cache checks that each row reaches exactly its window and the sinks."""
    rig = sink_rig(8, num_sinks, max_num_seqs=1, max_num_batched_tokens=chunk)
    request = rig.add(num_prompt, max_tokens=30)
    rig.run_to_end()

    assert rig.of(BlocksReleased)
    check_answers(rig, request)


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(12, []), (15, []), (16, [2]), (19, [2]), (20, [2, 3]), (28, [2, 3, 4, 5])]
)
def test_blocks_between_sinks_and_window_are_given_back_at_once(num_computed, expected):
    """5 sinks, window 5, blocks of 4: at p = 16 the window is 12 .. 16, and block 2 lies between it and block 1."""
    rig = sink_rig(5, 5, max_num_seqs=1, max_num_batched_tokens=1)
    request = rig.add(40)
    rig.run(num_computed)
    plan = rig.schedule()

    assert [index for index in range(num_computed // 4 + 1) if index not in live(rig, request)] == expected
    assert rig.paged.num_held_blocks(request) == len(live(rig, request))
    rig.commit(plan)


@pytest.mark.parametrize("window", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("num_sinks", [1, 4, 5, 9])
@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_live_blocks_never_exceed_what_is_promised(window, num_sinks, chunk):
    rig = sink_rig(window, num_sinks, max_num_seqs=1, max_num_batched_tokens=chunk, num_blocks=200)
    request = rig.add(90, max_tokens=20)
    cap = -(-num_sinks // 4) + -(-(window - 1 + chunk) // 4) + 1
    assert rig.paged.num_blocks(100_000) == cap
    most = 0
    while rig.scheduler.has_unfinished:
        plan = rig.schedule()
        most = max(most, len(live(rig, request)))
        rig.commit(plan)

    assert cap - 1 <= most <= cap


def test_a_few_blocks_hold_a_request_of_any_length():
    rig = sink_rig(8, 5, num_blocks=6, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=1_000)
    assert rig.scheduler.longest_request_tokens == 1_000
    request = rig.add(200, max_tokens=200)
    rig.run_to_end()

    check_answers(rig, request)
    assert not rig.of(RequestPreempted)


def test_hit_needs_the_sinks_and_the_last_window():
    """40 cached tokens, 5 sinks, window 8: blocks 0, 1, 8 and 9 of ten are enough."""
    rig = sink_rig(8, 5, num_blocks=40)
    rig.add(40, max_tokens=1)
    rig.run_to_end()
    evict(rig, *(range(start, start + 4) for start in range(8, 32, 4)))
    request = rig.add([*range(40), 900, 901])
    plan = rig.schedule()

    assert request.num_hit_tokens == 40
    ids = list(plan.tables[0].block_ids)
    assert [index for index, block in enumerate(ids) if block == NULL_BLOCK] == list(range(2, 8))
    rig.commit(plan)
    rig.run_to_end()
    check_answers(rig, request)


@pytest.mark.parametrize(("gone", "expected"), [(range(4), 0), (range(4, 8), 4), (range(36, 40), 36)])
def test_hit_ends_where_a_sink_or_the_window_is_missing(gone, expected):
    rig = sink_rig(8, 5, num_blocks=40)
    rig.add(40, max_tokens=1)
    rig.run_to_end()
    evict(rig, gone)
    request = rig.add([*range(40), 900, 901])
    rig.run_to_end()

    assert request.num_hit_tokens == expected
    check_answers(rig, request)


def test_forks_hold_sinks_and_window_and_give_both_back():
    rig = sink_rig(8, 5, num_blocks=60, max_num_seqs=3)
    answers = rig.add_answers(list(range(50)), n=3, temperature=1.0, max_tokens=20)
    rig.run_to_end()

    assert rig.of(RequestForked)
    check_answers(rig, *answers)
    assert rig.paged.num_free_blocks == rig.paged.num_usable_blocks
