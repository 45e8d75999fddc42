"""Step plans written by hand, for testing runners without a scheduler.

    table = [3, 1, 2]                                      # block ids, one list per KV group
    plan = make_plan([Chunk("a", [5, 6, 7], tables=[table], sample=SamplingParams(temperature=0))])

A `Chunk` is what one request computes in a step. Nothing is checked here: some tests want wrong plans.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.sampling import SamplingParams
from octavo.core.step import BlockCopy, GroupTables, PromptLogprobRows, SampleRow, StepPlan
from octavo.units import BlockId, RequestId

GREEDY_WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=8)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request.

    Args:
        request_id: Names the request.
        token_ids: Tokens to compute.
        start: Position of the first one.
        tables: Block ids per KV group.
        sample: How to choose the next token after the last one; `None` chooses nothing.
        seed: Of that choice.
        targets: Tokens to score: the row of `token_ids[i]` scores `targets[i]`. Empty scores nothing.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int = 0
    tables: Sequence[Sequence[int]] = ()
    sample: SamplingParams | None = GREEDY_WITH_LOGPROBS
    seed: int = 0
    targets: Sequence[int] = ()


def make_plan(
    chunks: Sequence[Chunk],
    *,
    step: int = 0,
    copies: Sequence[tuple[int, int]] = (),
    new_blocks: Sequence[int] = (),
    num_top: int = 4,
) -> StepPlan:
    """Return the plan of a step that computes these chunks.

    Args:
        copies: (source, destination) pairs.
        num_top: Likeliest tokens reported per scored token.
    """
    offsets, token_ids, selected = array("i", [0]), array("i"), array("i")
    samples: list[SampleRow] = []
    scores: list[PromptLogprobRows] = []
    for chunk in chunks:
        first = len(token_ids)
        token_ids.extend(chunk.token_ids)
        offsets.append(len(token_ids))
        if chunk.targets:
            scores.append(
                PromptLogprobRows(
                    request_id=RequestId(chunk.request_id),
                    first_logits_row=len(selected),
                    target_token_ids=array("i", chunk.targets),
                    num_top=num_top,
                )
            )
            selected.extend(range(first, first + len(chunk.targets)))
        if chunk.sample is not None:
            if not selected or selected[-1] != len(token_ids) - 1:
                selected.append(len(token_ids) - 1)
            samples.append(
                SampleRow(
                    request_id=RequestId(chunk.request_id),
                    logits_row=len(selected) - 1,
                    position=chunk.start + len(chunk.token_ids),
                    params=chunk.sample,
                    seed=chunk.seed,
                )
            )
    return StepPlan(
        step=step,
        request_ids=tuple(RequestId(chunk.request_id) for chunk in chunks),
        query_offsets=offsets,
        start_positions=array("i", [chunk.start for chunk in chunks]),
        token_ids=token_ids,
        tables=tuple(_group(group) for group in zip(*(chunk.tables for chunk in chunks), strict=True)),
        copies=tuple(BlockCopy(source=BlockId(source), destination=BlockId(target)) for source, target in copies),
        new_blocks=tuple(BlockId(block) for block in new_blocks),
        selected_rows=selected,
        samples=tuple(samples),
        prompt_logprobs=tuple(scores),
    )


def _group(tables: Sequence[Sequence[int]]) -> GroupTables:
    block_ids, offsets = array("i"), array("i", [0])
    for table in tables:
        block_ids.extend(table)
        offsets.append(len(block_ids))
    return GroupTables(block_ids=block_ids, offsets=offsets)
