"""build_plan: turns the scheduler's choice into the flat arrays a runner reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from octavo.core.kv_cache import KVCache
from octavo.core.request import Request
from octavo.core.step import GroupTables, PromptLogprobRows, SampleRow, StepPlan


def build_plan(step: int, scheduled: Sequence[tuple[Request, int]], kv_cache: KVCache) -> StepPlan:
    """Return the plan of a step.

    Args:
        step: Number of the step.
        scheduled: Running requests and how many of their uncomputed tokens to compute, in row order.
        kv_cache: Holds their block tables; the plan gets copies, so that it stays what was decided.
    Mutates: nothing.
    """
    query_offsets, start_positions, token_ids = array("i", [0]), array("i"), array("i")
    selected_rows = array("i")
    samples: list[SampleRow] = []
    prompt_logprobs: list[PromptLogprobRows] = []
    for request, num_tokens in scheduled:
        start = request.num_computed_tokens
        stop = start + num_tokens
        first_row = len(token_ids)
        token_ids.extend(request.content.token_ids(start, stop))
        query_offsets.append(len(token_ids))
        start_positions.append(start)
        if request.params.prompt_logprobs is not None:
            rows = _prompt_logprob_rows(request, start, stop, len(selected_rows))
            if rows is not None:
                prompt_logprobs.append(rows)
                first = first_row + request.num_scored_tokens - start
                selected_rows.extend(range(first, first + len(rows.target_token_ids)))
        if stop == request.num_known_tokens and request.params.max_tokens != 0:
            samples.extend(_sample_row(one, len(selected_rows), stop) for one in (request, *request.forks))
            selected_rows.append(len(token_ids) - 1)
    return StepPlan(
        step=step,
        request_ids=tuple(request.request_id for request, _ in scheduled),
        query_offsets=query_offsets,
        start_positions=start_positions,
        token_ids=token_ids,
        tables=_group_tables([kv_cache.tables(request) for request, _ in scheduled]),
        copies=tuple(copy for request, _ in scheduled for copy in kv_cache.step_copies(request)),
        new_blocks=tuple(block for request, _ in scheduled for block in kv_cache.step_new_blocks(request)),
        selected_rows=selected_rows,
        samples=tuple(samples),
        prompt_logprobs=tuple(prompt_logprobs),
    )


def _group_tables(tables: Sequence[Sequence[array[int]]]) -> tuple[GroupTables, ...]:
    """Concatenate the tables of all requests, group by group."""
    groups = []
    for group_tables in zip(*tables, strict=True):
        block_ids, offsets = array("i"), array("i", [0])
        for table in group_tables:
            block_ids.extend(table)
            offsets.append(len(block_ids))
        groups.append(GroupTables(block_ids=block_ids, offsets=offsets))
    return tuple(groups)


def _prompt_logprob_rows(request: Request, start: int, stop: int, first_logits_row: int) -> PromptLogprobRows | None:
    """Return the rows of this chunk that score a prompt token not scored yet.

    The row of position p scores token p + 1; the last prompt position scores nothing (its logits choose the first
    output token). A resumed request computes rows again whose tokens have been scored before.
    """
    first = request.num_scored_tokens
    last = min(stop, request.num_prompt_tokens - 1)
    if not start <= first < last:
        return None
    return PromptLogprobRows(
        request_id=request.request_id,
        first_logits_row=first_logits_row,
        target_token_ids=request.content.token_ids(first + 1, last + 1),
        num_top=request.params.prompt_logprobs or 0,
    )


def _sample_row(request: Request, logits_row: int, position: int) -> SampleRow:
    has_penalties = request.params.has_penalties
    return SampleRow(
        request_id=request.request_id,
        logits_row=logits_row,
        position=position,
        params=request.params,
        seed=request.seed,
        banned_token_ids=request.banned_token_ids,
        prompt_token_ids=request.prompt_token_ids() if has_penalties else array("i"),
        output_token_ids=request.output_token_ids() if has_penalties else array("i"),
        allowed_tokens=request.allowed_tokens,
    )
