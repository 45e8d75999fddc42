"""Window groups: what stays, what is given back, what a hit needs, and how much a request can ever hold."""

import pytest

from octavo.core.events import BlocksReleased, RequestAdmitted, RequestPreempted
from octavo.core.kv_cache import GroupSpec
from octavo.core.step import NULL_BLOCK
from octavo.testing.factories import CoreSetup, Rig, make_request, solo_output

FULL = GroupSpec()


def window_rig(window, **setup):
    return Rig(CoreSetup(**{"groups": (GroupSpec(window=window),), **setup}))


def check_answers(rig, *requests):
    for request in requests:
        assert (rig.output(request), request.finish_reason) == solo_output(request, rig.setup)


def live(rig, request, group=0):
    """Return the indexes of blocks that a request holds in a group."""
    return [index for index, block in enumerate(rig.paged.tables(request)[group]) if block != NULL_BLOCK]


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("num_prompt", [7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("groups", [(GroupSpec(window=8),), (FULL, GroupSpec(window=8))], ids=["window", "full+window"])
def test_answer_does_not_depend_on_chunks_and_freed_blocks(groups, num_prompt, chunk):
    """Window 8, blocks of 4: the shadow cache checks that each row reaches exactly its own window (OPN-21)."""
    rig = Rig(CoreSetup(groups=groups, max_num_seqs=1, max_num_batched_tokens=chunk))
    request = rig.add(num_prompt, max_tokens=20)
    rig.run_to_end()

    assert any(event.group == len(groups) - 1 for event in rig.of(BlocksReleased))
    check_answers(rig, request)


@pytest.mark.parametrize(
    ("num_computed", "expected"),
    [(4, 0), (8, 0), (10, 0), (11, 0), (12, 1), (13, 1), (15, 1), (16, 2)],
)
def test_block_is_given_back_as_soon_as_no_query_can_see_it(num_computed, expected):
    """Window 9, blocks of 4: the query at position p sees p - 8 .. p, so block 0 (positions 0 .. 3) goes at p = 12."""
    rig = window_rig(9, max_num_seqs=1, max_num_batched_tokens=1)
    request = rig.add(40)
    rig.run(num_computed)
    plan = rig.schedule()

    assert request.num_computed_tokens == num_computed
    held = live(rig, request)
    assert held == list(range(expected, num_computed // 4 + 1))
    table = rig.paged.tables(request)[0]
    assert list(table[:expected]) == [NULL_BLOCK] * expected
    rig.commit(plan)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 16])
def test_live_blocks_never_exceed_what_is_promised(window, chunk):
    """(window - 1 + chunk) / block_size, rounded up, + 1; a full group beside it is not bounded by that."""
    rig = Rig(
        CoreSetup(groups=(GroupSpec(window=window), FULL), max_num_seqs=1, max_num_batched_tokens=chunk, num_blocks=200)
    )
    request = rig.add(90, max_tokens=20)
    cap = -(-(window - 1 + chunk) // 4) + 1
    assert rig.paged.num_blocks(100_000) == cap + 25_000
    most = 0
    while rig.scheduler.has_unfinished:
        plan = rig.schedule()
        most = max(most, len(live(rig, request)))
        rig.commit(plan)

    assert cap - 1 <= most <= cap


def test_pool_of_one_window_holds_a_request_of_any_length():
    """Window 8, chunks of 4: 4 blocks suffice for 200 tokens, so the door lets them in."""
    rig = window_rig(8, num_blocks=4, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=1_000)
    assert rig.scheduler.longest_request_tokens == 1_000
    request = rig.add(200, max_tokens=100)
    rig.run_to_end()

    check_answers(rig, request)
    assert not rig.of(RequestPreempted)


def test_pool_smaller_than_a_window_bounds_the_length():
    """2 blocks of 4 under a cap of 4: only 8 tokens, and the last output token needs no place."""
    rig = window_rig(8, num_blocks=2, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=1_000)

    assert rig.scheduler.longest_request_tokens == 9


def test_hit_needs_only_the_window():
    """40 cached tokens, window 8: the blocks before the last two may be gone, and 40 tokens still hit."""
    rig = window_rig(8, num_blocks=40)
    rig.add(40, max_tokens=1)
    rig.run_to_end()
    for block in sorted(rig.paged.pool.blocks, key=lambda block: block.id):
        if block.key and block.key.tokens not in wanted(range(32, 36), range(36, 40)):
            rig.paged.pool._evict(block)
    request = rig.add([*range(40), 900, 901])
    plan = rig.schedule()

    assert request.num_hit_tokens == 40
    assert list(plan.tables[0].block_ids[:8]) == [NULL_BLOCK] * 8
    rig.commit(plan)
    rig.run_to_end()
    check_answers(rig, request)


def test_hit_moves_left_until_a_whole_window_is_cached():
    """The last block is gone: a hit of 40 would need it, one of 36 needs blocks 7 and 8 only."""
    rig = window_rig(8, num_blocks=40)
    rig.add(40, max_tokens=1)
    rig.run_to_end()
    for block in rig.paged.pool.blocks:
        if block.key and block.key.tokens in wanted(range(36, 40)):
            rig.paged.pool._evict(block)
    request = rig.add([*range(40), 900, 901])
    rig.run_to_end()

    assert request.num_hit_tokens == 36
    check_answers(rig, request)


@pytest.mark.parametrize("groups", [(FULL, GroupSpec(window=8)), (GroupSpec(window=8), GroupSpec(window=20))])
def test_hit_is_the_longest_that_suits_every_group(groups):
    """A block in the middle of the last group's window is gone: all groups hit what ends before it."""
    rig = Rig(CoreSetup(groups=groups, num_blocks=80))
    rig.add(40, max_tokens=1)
    rig.run_to_end()
    for block in rig.paged.pool.blocks:
        if block.key and block.group == 1 and block.key.tokens in wanted(range(32, 36)):
            rig.paged.pool._evict(block)
    request = rig.add([*range(40), 900, 901])
    rig.run_to_end()

    assert request.num_hit_tokens == 32
    check_answers(rig, request)


def test_window_group_does_not_keep_a_full_group_from_hitting_less():
    """Without any block of the window group there is no hit at all, however much the full group has."""
    rig = Rig(CoreSetup(groups=(FULL, GroupSpec(window=8)), num_blocks=80))
    rig.add(40, max_tokens=1)
    rig.run_to_end()
    for block in list(rig.paged.pool.indexes[1].blocks()):
        rig.paged.pool._evict(block)
    request = rig.add([*range(40), 900])
    rig.run_to_end()

    assert request.num_hit_tokens == 0
    check_answers(rig, request)


def test_resumed_request_needs_only_its_window():
    """Displaced far behind the window's start: what was given back long ago need not be computed again."""
    rig = window_rig(8, num_blocks=30, max_num_seqs=1, policy="priority")
    displaced = rig.add(24, priority=1, max_tokens=30)
    rig.run(10)
    urgent = rig.add(range(100, 140), priority=0, max_tokens=4)
    rig.run_to_end()

    [resumed] = [event for event in rig.of(RequestAdmitted) if event.is_resumed]
    assert resumed.request_id == displaced.request_id
    assert resumed.num_block_hit_tokens + resumed.num_copied_hit_tokens == resumed.num_known_tokens - 1
    check_answers(rig, displaced, urgent)


def test_window_of_one_token_is_refused():
    """Such a group would keep nothing, and "hit" prompts that nobody ever computed (found by the state machine)."""
    with pytest.raises(AssertionError):
        GroupSpec(window=1)


def wanted(*ranges):
    return {make_request(ids).content.identity(0, len(ids)) for ids in ranges}
