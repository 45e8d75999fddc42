"""StepPlan and StepResult: all that passes between the scheduler and a runner.

Both are frozen and picklable, so that a runner may live in another process. Integers that kernels read are stdlib
`array('i')` (32-bit), laid out as the kernels want them: one flat array per step, with offsets per request.

    query_offsets   0         3    4              9
    token_ids       a a a     b    c c c c c          tokens computed this step, request by request
    position        s_a..+2   s_b  s_c..s_c+4         s_r = start_positions[r], the tokens already in the cache

    tables[g].offsets     0        2    5     7
    tables[g].block_ids   4 9      1 7 3  8 2         slot of position p: block_ids[offsets[r] + p // block_size],
                                                      place p % block_size in it
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from octavo.core.sampling import SamplingParams
from octavo.units import BlockId, RequestId, TokenId

NULL_BLOCK = BlockId(0)
"""Filler in block tables for positions that no query can see any more (out of a window). Never written or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTables:
    """Block tables of one KV group for the requests of a step.

    `block_ids[offsets[r]:offsets[r + 1]]` covers at least the positions `0 .. context length - 1` of request r.
    """

    block_ids: array[int]
    offsets: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy one whole block over all layers of its group before the step computes anything (copy-on-write)."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One token to choose.

    Several samples may share a row: `n` answers to one prompt draw their first tokens from the same logits.

    Args:
        logits_row: Index into `StepPlan.selected_rows`.
        position: Position the new token will have; the random draw is keyed by (seed, position) alone.
        seed: The request's own seed, drawn on arrival when the caller gave none.
        banned_token_ids: Ids masked for this draw (end-of-sequence and stop ids before `min_tokens`).
        prompt_token_ids, output_token_ids: The history that penalties count; empty unless penalties are on.
        allowed_tokens: The ids this draw chooses among, one bit per id of the vocabulary in little-endian 32-bit words,
            lowest id first; `None` allows all.
    """

    request_id: RequestId
    logits_row: int
    position: int
    params: SamplingParams
    seed: int
    banned_token_ids: tuple[int, ...] = ()
    prompt_token_ids: array[int] = field(default_factory=lambda: array("i"))
    output_token_ids: array[int] = field(default_factory=lambda: array("i"))
    allowed_tokens: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobRows:
    """Prompt tokens to score: row `first_logits_row + i` is scored against `target_token_ids[i]`."""

    request_id: RequestId
    first_logits_row: int
    target_token_ids: array[int]
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The scheduler's decision for one step: which tokens of which requests, where their K/V goes, what is sampled.

    Args:
        step: Number of the step, from 0.
        request_ids: Requests of the step, in row order; length R.
        query_offsets: Rows of request r are `query_offsets[r] .. query_offsets[r + 1] - 1`; length R + 1.
        start_positions: Position of each request's first row; length R.
        token_ids: Token of each row; length T.
        tables: Block tables, one entry per KV group.
        copies: Block copies to do first. No block is both source and destination.
        new_blocks: Blocks handed out for this step, destinations of copies included; their content is undefined until
            copied to or written. Tests poison it, before the copies are made.
        selected_rows: Rows whose logits are wanted, ascending.
        samples: Tokens to choose.
        prompt_logprobs: Prompt tokens to score.
    """

    step: int
    request_ids: tuple[RequestId, ...]
    query_offsets: array[int]
    start_positions: array[int]
    token_ids: array[int]
    tables: tuple[GroupTables, ...]
    copies: tuple[BlockCopy, ...] = ()
    new_blocks: tuple[BlockId, ...] = ()
    selected_rows: array[int]
    samples: tuple[SampleRow, ...]
    prompt_logprobs: tuple[PromptLogprobRows, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probability of one token under the model, its rank (1 = most likely), and the likeliest tokens."""

    token_id: TokenId
    logprob: float
    rank: int
    top: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The token chosen for `StepPlan.samples[i]`; `logprobs` only if the request asked for them."""

    request_id: RequestId
    token_id: TokenId
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a runner answers: one entry per sample and one per `prompt_logprobs` entry, in the plan's order."""

    step: int
    samples: tuple[SampledToken, ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
