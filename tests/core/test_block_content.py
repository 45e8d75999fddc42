"""What a block holds, told from tables and from keys."""

from __future__ import annotations

from octavo.core.block_content import block_tokens
from octavo.core.step import NULL_BLOCK
from octavo.testing.factories import CoreSetup, Rig


def test_a_held_block_tells_its_computed_tokens_and_a_cached_one_its_key() -> None:
    rig = Rig(CoreSetup(num_blocks=12, block_size=4))
    request = rig.add(range(100, 110), max_tokens=3)
    rig.step()

    (table,) = rig.paged.tables(request)
    held = [list(block_tokens(rig.paged, rig.scheduler.requests, block)) for block in table]
    assert held == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]

    rig.run_to_end()
    texts = [list(block_tokens(rig.paged, (), block)) for block in range(1, 13)]
    assert texts.count([100, 101, 102, 103]) == 1 and texts.count([]) == 9
    computed = [*range(100, 110), *rig.output(request)[:-1]]
    assert computed[8:] in texts, "the tail, as far as it was computed"


def test_a_reserved_run_tells_what_is_in_it() -> None:
    rig = Rig(CoreSetup(num_blocks=16, block_size=4, max_model_len=32, allocator="reserved"))
    request = rig.add(range(100, 106), max_tokens=3)
    rig.step()

    (table,) = rig.scheduler.kv_cache.tables(request)
    held = [list(block_tokens(rig.scheduler.kv_cache, rig.scheduler.requests, block)) for block in table[:3]]
    assert held == [[100, 101, 102, 103], [104, 105], []]
    assert NULL_BLOCK not in table
