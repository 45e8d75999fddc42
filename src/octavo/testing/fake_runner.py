"""FakeRunner: executes plans without a model, and checks what it is told to read.

Keeps a shadow of the KV cache: each place of each block remembers the token and position written to it. A row may
attend only to places that spell exactly the request's own tokens, so aliasing, stale and unwritten places are found
with no arithmetic at all. The token it "samples" is a hash of everything the row can see, so an output depends on the
whole history, as with a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from octavo.core.kv_cache import GroupSpec
from octavo.core.sampling import SamplingParams
from octavo.core.step import NULL_BLOCK, SampledToken, SampleRow, StepPlan, StepResult, TokenLogprobs
from octavo.units import TokenId

Place = tuple[int, int]
"""(token id, position) last written to a place of the cache."""

ChooseToken = Callable[[SampleRow, Sequence[int]], int]
"""Returns the next token of a row from its whole history."""


def hashed_token(vocab_size: int) -> ChooseToken:
    """Return a choice that depends on every token before it and, unless greedy, on the seed; never a forbidden one."""

    def choose(row: SampleRow, history: Sequence[int]) -> int:
        seed = 0 if row.params.is_greedy else row.seed
        digest = hashlib.blake2b(repr((seed, list(history))).encode(), digest_size=8).digest()
        first = int.from_bytes(digest, "little")
        tokens = ((first + offset) % vocab_size for offset in range(vocab_size))
        return next(token for token in tokens if token not in row.banned_token_ids and _is_allowed(row, token))

    return choose


class FakeRunner:
    """Implements `Runner` over a shadow cache.

    Args:
        block_size, num_blocks, groups: As the scheduler's allocator has them.
        choose: Picks each sampled token.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[GroupSpec] = (GroupSpec(),),
        choose: ChooseToken | None = None,
    ) -> None:
        self._block_size = block_size
        self._groups = tuple(groups)
        self._choose = choose or hashed_token(1000)
        self._places: list[list[list[Place | None]]] = [
            [[None] * block_size for _ in range(num_blocks + 1)] for _ in groups
        ]
        self._result: StepResult | None = None
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        assert self._result is None, "a step is in flight"
        self._result = self._run(plan)

    def collect(self) -> StepResult:
        assert self._result is not None, "no step is in flight"
        result, self._result = self._result, None
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def _run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._copy_blocks(plan)
        self._write(plan)
        histories = {index: self._read(plan, index) for index in range(plan.num_requests)}
        samples = []
        for row in plan.samples:
            index, position = self._locate(plan, plan.selected_rows[row.logits_row])
            assert position + 1 == row.position
            history = self._visible(histories[index][: position + 1])
            token_id = TokenId(self._choose(row, history))
            samples.append(SampledToken(request_id=row.request_id, token_id=token_id, logprobs=_logprobs(row.params)))
        scores = tuple(
            tuple(TokenLogprobs(token_id=TokenId(token_id), logprob=-1.0, rank=1) for token_id in rows.target_token_ids)
            for rows in plan.prompt_logprobs
        )
        return StepResult(step=plan.step, samples=tuple(samples), prompt_logprobs=scores)

    def _copy_blocks(self, plan: StepPlan) -> None:
        for places in self._places:
            for block_id in plan.new_blocks:
                places[block_id] = [None] * self._block_size
            for copy in plan.copies:
                places[copy.destination] = list(places[copy.source])

    def _write(self, plan: StepPlan) -> None:
        for index in range(plan.num_requests):
            start = plan.start_positions[index]
            for row in range(plan.query_offsets[index], plan.query_offsets[index + 1]):
                position = start + row - plan.query_offsets[index]
                for group, tables in enumerate(plan.tables):
                    block_id = tables.block_ids[tables.offsets[index] + position // self._block_size]
                    assert block_id != NULL_BLOCK, f"the null block is written for position {position}"
                    self._places[group][block_id][position % self._block_size] = (plan.token_ids[row], position)

    def _read(self, plan: StepPlan, index: int) -> list[int]:
        """Return the tokens that the request's tables spell; every visible place must hold its own position."""
        start = plan.start_positions[index]
        stop = start + plan.query_offsets[index + 1] - plan.query_offsets[index]
        history: list[int | None] = [None] * stop
        for group, (spec, tables) in enumerate(zip(self._groups, plan.tables, strict=True)):
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in (*range(min(spec.num_sinks, first)), *range(first, stop)):
                block_id = tables.block_ids[tables.offsets[index] + position // self._block_size]
                assert block_id != NULL_BLOCK, f"position {position} is visible but its block is gone"
                place = self._places[group][block_id][position % self._block_size]
                assert place is not None, f"unwritten place of block {block_id} read for position {position}"
                assert place[1] == position, f"block {block_id} holds position {place[1]}, not {position}"
                assert history[position] in (None, place[0]), "two groups disagree about a token"
                history[position] = place[0]
        return [token if token is not None else -1 for token in history]

    def _visible(self, history: list[int]) -> list[int]:
        """Hide what the last row of `history` cannot see, so that a choice does not depend on where a chunk began."""
        windows = [spec.window for spec in self._groups if spec.window is not None]
        if len(windows) < len(self._groups):
            return history
        num_sinks = max(spec.num_sinks for spec in self._groups)
        num_hidden = max(0, len(history) - max(windows) - num_sinks)
        return [*history[:num_sinks], *[-1] * num_hidden, *history[num_sinks + num_hidden :]]

    @staticmethod
    def _locate(plan: StepPlan, row: int) -> tuple[int, int]:
        for index in range(plan.num_requests):
            if row < plan.query_offsets[index + 1]:
                return index, plan.start_positions[index] + row - plan.query_offsets[index]
        raise AssertionError(f"row {row} is beyond the plan")


def _is_allowed(row: SampleRow, token_id: int) -> bool:
    return row.allowed_tokens is None or bool(row.allowed_tokens[token_id // 8] >> token_id % 8 & 1)


def _logprobs(params: SamplingParams) -> TokenLogprobs | None:
    return TokenLogprobs(token_id=TokenId(0), logprob=-1.0, rank=1) if params.logprobs is not None else None
