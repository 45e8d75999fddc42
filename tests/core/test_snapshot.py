"""The snapshot: who holds which block, for people to look at."""

from octavo.core.block_pool import CACHED, EMPTY
from octavo.core.events import RequestAdmitted
from octavo.core.kv_cache import GroupSpec
from octavo.testing.factories import CoreSetup, Rig


def test_snapshot_shows_holders_and_requests():
    rig = Rig(CoreSetup(max_num_seqs=2, num_blocks=10))
    shared = rig.add(8, max_tokens=6)
    rig.step()
    other = rig.add([*range(8), 9], max_tokens=6)
    waiting = rig.add([5])
    rig.step()
    snapshot = rig.scheduler.snapshot()

    assert (snapshot.num_usable_blocks, snapshot.num_free_blocks, snapshot.block_size) == (10, 6, 4)
    assert snapshot.num_used_blocks == len(snapshot.holders) == 4
    assert sorted(snapshot.holders.values()) == [1, 1, 2, 2]
    views = {view.request_id: view for view in snapshot.requests}
    assert views[shared.request_id].num_computed_tokens == 9
    assert views[other.request_id].num_hit_tokens == 8
    assert len(views[other.request_id].tables[0]) == 3
    assert (views[waiting.request_id].status, views[waiting.request_id].tables) == ("waiting", ())
    assert views[waiting.request_id].max_total_tokens == 9


def test_null_blocks_have_no_holder():
    rig = Rig(CoreSetup(groups=(GroupSpec(window=4),), max_num_seqs=1))
    rig.add(20)
    rig.run(3)

    assert 0 not in rig.scheduler.snapshot().holders
    assert rig.scheduler.snapshot().num_used_blocks == len(rig.scheduler.snapshot().holders)


def test_the_map_shows_each_block_as_empty_cached_or_held_by_so_many():
    rig = Rig(CoreSetup(num_blocks=10))
    rig.add(8, max_tokens=1)
    rig.step()
    rig.add([*range(8), 9], max_tokens=6)
    rig.step()
    rig.add([*range(8), 10], max_tokens=6)
    rig.step()

    block_map = rig.scheduler.snapshot().block_map

    assert len(block_map) == 10
    assert {block: count - 1 for block, count in enumerate(block_map, start=1) if count > CACHED} == dict(
        rig.scheduler.snapshot().holders
    )
    assert sorted(block_map) == [EMPTY] * 6 + [2, 2, 3, 3]
    rig.run_to_end()
    assert set(rig.scheduler.snapshot().block_map) == {EMPTY, CACHED}
    rig.scheduler.reset_prefix_cache()
    assert set(rig.scheduler.snapshot().block_map) == {EMPTY}


def test_the_map_of_a_reserved_pool_shows_whole_runs():
    rig = Rig(CoreSetup(num_blocks=10, allocator="reserved", max_model_len=16))
    rig.add(3, max_tokens=6)
    rig.step()

    assert rig.scheduler.snapshot().block_map == bytes([2] * 4 + [EMPTY] * 6)


def test_an_admission_names_the_blocks_it_hits_so_that_events_alone_show_who_shares():
    """Two groups; in the window one, the first blocks of the hit are out of sight."""
    rig = Rig(CoreSetup(groups=(GroupSpec(), GroupSpec(window=5))))
    first = rig.add(16, max_tokens=9)
    rig.step()
    tables = [tuple(table[:4]) for table in rig.paged.tables(first)]
    rig.add([*range(16), 99], "second", max_tokens=2)
    rig.step()

    [_, admitted] = rig.of(RequestAdmitted)
    assert admitted.num_block_hit_tokens == 16
    assert admitted.hit_block_ids[0] == tables[0]
    assert admitted.hit_block_ids[1] == (0, 0, 0, tables[1][3])
    assert rig.of(RequestAdmitted)[0].hit_block_ids == ((), ())
