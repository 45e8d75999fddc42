"""Runs the same requests under different pressure, so that their bits can be compared.

A `Pressure` says how an engine is squeezed (chunk size, seats, blocks, block size, caching); `run` answers prompts
under it and returns every token with its log-probabilities as floats, what the engine counted, and the plans, so that a
test can assert that the pressure it relies on happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.core.events import EventLog
from octavo.core.kv_cache import GroupSpec
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.ports import Runner
from octavo.core.sampling import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import NULL_BLOCK, StepPlan, TokenLogprobs
from octavo.engine.clock import MonotonicClock
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest
from octavo.engine.metrics import Metrics
from octavo.models.spec import KVGroup, ModelSpec
from octavo.units import cdiv

Token = tuple[int, float, tuple[tuple[int, float], ...]]
"""Token id, its log-probability, and the likeliest tokens with theirs: compared with `==`, never with a tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How an engine is squeezed. The default is none: one request at a time, whole prompts, nothing shared."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 1
    num_blocks: int = 256
    block_size: int = 16
    is_caching: bool = False
    threads: int = 1
    max_model_len: int = 1024


class KVReadingRunner(Runner, Protocol):
    """A runner whose stored keys and values can be looked at."""

    def read_kv(self, layer: int, block_ids: Sequence[int], num_tokens: int) -> tuple[Any, ...]:
        """Return arrays of keys and values of the first `num_tokens` positions of a block table."""


MakeRunner = Callable[[Pressure], KVReadingRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRun:
    """What came out.

    Args:
        answers: `answers[i][k]` is answer k to prompt i.
        prompt_scores: `prompt_scores[i]` is what `prompt_logprobs` brought.
        kv_digests: `kv_digests[i][k]` is a digest of the keys and values stored for answer k when it ended.
    """

    answers: tuple[tuple[tuple[Token, ...], ...], ...]
    prompt_scores: tuple[tuple[TokenLogprobs, ...], ...]
    kv_digests: tuple[tuple[str, ...], ...]
    metrics: Metrics
    plans: tuple[StepPlan, ...]

    @property
    def max_requests_in_a_step(self) -> int:
        return max(plan.num_requests for plan in self.plans)

    @property
    def num_copies(self) -> int:
        return sum(len(plan.copies) for plan in self.plans)


class _StoredKV:
    """Digests what the cache holds of each answer when it ends: its last plan says where.

    Of a group with a window that is what the answer's last query sees. What lies before it may be there or not,
    depending on the chunks.
    """

    def __init__(self, spec: ModelSpec, runner: KVReadingRunner, block_size: int) -> None:
        self._groups = spec.kv_groups
        self._runner = runner
        self._block_size = block_size
        self._places: dict[str, tuple[int, list[list[int]]]] = {}

    def take(self, plan: StepPlan) -> None:
        for index, request_id in enumerate(plan.request_ids):
            num_rows = plan.query_offsets[index + 1] - plan.query_offsets[index]
            tables = [list(group.block_ids[group.offsets[index] : group.offsets[index + 1]]) for group in plan.tables]
            self._places[request_id] = plan.start_positions[index] + num_rows, tables

    def digest(self, request_id: str) -> str:
        """Read before the next step: the blocks are free already, but nobody has written to them yet."""
        num_tokens, tables = self._places[request_id]
        digest = hashlib.blake2b(digest_size=16)
        for group, table in zip(self._groups, tables, strict=True):
            for first, stop in _seen_runs(group, num_tokens):
                skipped = first // self._block_size
                needed = table[skipped : cdiv(stop, self._block_size)]
                assert NULL_BLOCK not in needed, "a block that the last query reads has been given back"
                for layer in group.layers:
                    for stored in self._runner.read_kv(layer, needed, stop - skipped * self._block_size):
                        digest.update(stored[first - skipped * self._block_size :].tobytes())
        return digest.hexdigest()


def _seen_runs(group: KVGroup, num_tokens: int) -> list[tuple[int, int]]:
    """Return the runs of positions that the last of so many tokens sees."""
    if group.window is None or num_tokens <= group.num_sinks + group.window:
        return [(0, num_tokens)]
    runs = [(0, group.num_sinks), (num_tokens - group.window, num_tokens)]
    return [(first, stop) for first, stop in runs if first < stop]


def run(
    spec: ModelSpec,
    make_runner: MakeRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    pressure: Pressure,
    *,
    num_rounds: int = 1,
) -> ExactRun:
    """Answer prompts under pressure.

    Args:
        params: For all prompts or one per prompt; should ask for `logprobs`.
        num_rounds: How often everything is sent, one round after the other; the last round's answers are returned.
    """
    events = EventLog()
    kv_cache = PagedKVCache(
        pressure.num_blocks,
        pressure.block_size,
        groups=[GroupSpec(window=group.window, num_sinks=group.num_sinks) for group in spec.kv_groups],
        max_chunk_tokens=pressure.max_num_batched_tokens,
        is_caching=pressure.is_caching,
        events=events,
    )
    limits = Limits(
        max_model_len=pressure.max_model_len,
        max_num_seqs=pressure.max_num_seqs,
        max_num_batched_tokens=pressure.max_num_batched_tokens,
    )
    scheduler = Scheduler(kv_cache, limits, events=events)
    clock = MonotonicClock()
    runner = make_runner(pressure)
    engine = Engine(scheduler, runner, events=events, clock=clock, vocab_size=spec.vocab_size)
    plans: list[StepPlan] = []
    engine.subscribe_plans(plans.append)
    stored = _StoredKV(spec, runner, pressure.block_size)
    engine.subscribe_plans(stored.take)
    digests: dict[tuple[str, int], str] = {}
    per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    answers: dict[tuple[str, int], list[Token]] = {}
    prompt_scores: dict[str, list[TokenLogprobs]] = {}
    for _ in range(num_rounds):
        answers = {(str(i), k): [] for i, one in enumerate(per_prompt) for k in range(one.n)}
        prompt_scores = {str(index): [] for index in range(len(prompts))}
        for index, (prompt, one) in enumerate(zip(prompts, per_prompt, strict=True)):
            engine.add(EngineRequest(request_id=str(index), prompt_token_ids=tuple(prompt), params=one))
        while engine.has_unfinished:
            for delta in engine.step():
                prompt_scores[delta.request_id].extend(delta.prompt_logprobs)
                if delta.finish_reason is not None:
                    name = (
                        delta.request_id
                        if per_prompt[int(delta.request_id)].n == 1
                        else f"{delta.request_id}/{delta.index}"
                    )
                    digests[delta.request_id, delta.index] = stored.digest(name)
                answers[delta.request_id, delta.index].extend(
                    (token_id, entry.logprob, entry.top)
                    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
                )
    return ExactRun(
        answers=tuple(tuple(tuple(answers[str(i), k]) for k in range(one.n)) for i, one in enumerate(per_prompt)),
        kv_digests=tuple(tuple(digests[str(i), k] for k in range(one.n)) for i, one in enumerate(per_prompt)),
        prompt_scores=tuple(tuple(scores) for scores in prompt_scores.values()),
        metrics=engine.metrics,
        plans=tuple(plans),
    )
