"""The snapshot: who holds which block, for people to look at."""

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
