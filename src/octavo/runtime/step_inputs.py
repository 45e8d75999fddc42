"""StepInputs: a StepPlan as the arrays that ops read, one entry per row or per request.

The plan's flat arrays are read in place. Everything that would make a runner write into the wrong place is asserted
here, once, so that ops need not look.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import NULL_BLOCK, StepPlan
from octavo.units import RequestId

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """The rows of one request: positions `start_position ... context_length - 1`, and its block table per group."""

    request_id: RequestId
    rows: slice
    start_position: int
    context_length: int
    block_ids: tuple[Int32, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What the ops of a step read beside buffers.

    Args:
        token_ids, positions: Per row, `[num_tokens]`.
        slot_block_ids: For each KV group the block each row's K/V goes to, `[num_tokens]`.
        slot_places: Place of each row within its block, `[num_tokens]`; the same in all groups.
        selected_rows: Rows whose logits are wanted.
    """

    token_ids: Int32
    positions: Int32
    requests: tuple[RequestRows, ...]
    slot_block_ids: tuple[Int32, ...]
    slot_places: Int32
    selected_rows: Int32


def read_step_inputs(plan: StepPlan, *, block_size: int, num_blocks: int) -> StepInputs:
    """Derive the arrays of a step.

    Args:
        num_blocks: Usable blocks; ids run from 1 to this.
    """
    assert len(plan.query_offsets) == len(plan.start_positions) + 1 == plan.num_requests + 1, "one range per request"
    assert plan.query_offsets[-1] == plan.num_tokens, "ranges cover all rows"
    requests = tuple(_request_rows(plan, index, block_size) for index in range(plan.num_requests))
    positions = np.concatenate(
        [np.arange(one.start_position, one.context_length, dtype=np.int32) for one in requests]
        or [np.empty(0, np.int32)]
    )
    slot_block_ids = tuple(
        np.concatenate(
            [one.block_ids[group][np.arange(one.start_position, one.context_length) // block_size] for one in requests]
            or [np.empty(0, np.int32)]
        )
        for group in range(len(plan.tables))
    )
    slot_places = positions % np.int32(block_size)
    for block_ids in slot_block_ids:
        _check_slots(block_ids, slot_places, num_blocks)
    selected_rows = _int32(plan.selected_rows)
    assert np.all(np.diff(selected_rows) > 0), "selected rows ascend"
    return StepInputs(
        token_ids=_int32(plan.token_ids),
        positions=positions,
        requests=requests,
        slot_block_ids=slot_block_ids,
        slot_places=slot_places,
        selected_rows=selected_rows,
    )


def _request_rows(plan: StepPlan, index: int, block_size: int) -> RequestRows:
    first, last = plan.query_offsets[index], plan.query_offsets[index + 1]
    start = plan.start_positions[index]
    context_length = start + last - first
    block_ids = tuple(_int32(table.block_ids)[table.offsets[index] : table.offsets[index + 1]] for table in plan.tables)
    for group_ids in block_ids:
        assert len(group_ids) * block_size >= context_length, f"{plan.request_ids[index]}: table ends before its rows"
    return RequestRows(
        request_id=plan.request_ids[index],
        rows=slice(first, last),
        start_position=start,
        context_length=context_length,
        block_ids=block_ids,
    )


def _check_slots(block_ids: Int32, places: Int32, num_blocks: int) -> None:
    assert not np.any(block_ids == NULL_BLOCK), "the null block is never written"
    assert np.all((block_ids > 0) & (block_ids <= num_blocks)), "a row goes to a block that does not exist"
    slots = block_ids.astype(np.int64) * (int(places.max(initial=0)) + 1) + places
    assert len(np.unique(slots)) == len(slots), "two rows of a step go to the same slot"


def _int32(numbers: object) -> Int32:
    return np.asarray(numbers, dtype=np.int32)
