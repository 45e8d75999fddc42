"""The invariance contract for every KV dtype under every way to keep and read less: windows, sinks, sparse reading.

Each cell is a random model of four layers on the native runner, and for one dtype on the reference; `alone` is the
truth that every other run must equal in tokens, log-probabilities (`==`) and stored keys and values. Every test
asserts that the pressure it is about was there. Weights, families and sampling are varied in the files beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.config.engine import KVDtype
from octavo.core.kv_cache import GroupSpec
from octavo.core.sampling import SamplingParams
from octavo.core.step import NULL_BLOCK, StepPlan
from octavo.models.decoder import emit_decoder
from octavo.models.kv_record import is_quantised
from octavo.models.sparse import NUM_DENSE_LAYERS, with_sparse_blocks
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.testing.exact_runs import ExactRun, KVReadingRunner, Pressure, run
from octavo.testing.native_probe import pack_arrays
from octavo.testing.random_weights import RandomModel, make_random_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
FULL = {"windows": (None,) * 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": FULL,
    "model window": {"windows": (24, None, 24, None)},
    "window and sinks": {**FULL, "window_and_sinks": (24, 20)},
    "sparse": FULL,
}
SPARSE_BLOCKS = 4
MOST_SEEN_TOKENS = 64
"""No query reads more keys than this where anything is left out: 24, 24 + 20, or 4 tiles of 16."""
SKIPPED_LAYERS = (0, 3)
"""One dense layer and one sparse one; of the model with windows, one layer of each group."""

DTYPES: tuple[KVDtype, ...] = ("f32", "f16", "bf16", "int8", "fp8_e4m3", "int4")
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3)
SHARED_TOKENS = 150
"""9 tiles and 6 tokens: 4 blocks of 32, a tile and 6 tokens; 3 blocks of 48 and 6 tokens."""


class Cell(NamedTuple):
    runner: str
    dtype: KVDtype
    setting: str
    skips: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.runner, self.dtype, self.setting, *(["skipping"] if self.skips else [])])


CELLS = [
    *(Cell("native", dtype, setting) for setting in SETTINGS for dtype in DTYPES),
    *(Cell("native", "int4", setting, SKIPPED_LAYERS) for setting in SETTINGS),
    *(Cell("reference", "int4", setting, SKIPPED_LAYERS) for setting in SETTINGS if setting != "dense"),
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A cell's model, and how to run it."""

    cell: Cell
    model: RandomModel
    weights: Any

    @property
    def has_gap(self) -> bool:
        """Whether blocks are given back while a request runs."""
        return "window" in self.cell.setting

    def make_runner(self, pressure: Pressure) -> KVReadingRunner:
        common = {
            "num_blocks": pressure.num_blocks,
            "block_size": pressure.block_size,
            "kv_cache_dtype": self.cell.dtype,
            "kv_skip_layers": self.cell.skips,
            "poison": True,
        }
        if self.cell.runner == "reference":
            return ReferenceRunner(self.model.spec, self.model.program, self.weights, **common)
        return NativeRunner(
            self.model.spec,
            self.model.program,
            self.weights,
            threads=pressure.threads,
            max_num_batched_tokens=pressure.max_num_batched_tokens,
            max_num_seqs=pressure.max_num_seqs,
            **common,
        )

    def run(
        self,
        prompts: list[list[int]] | None = None,
        params: SamplingParams = PARAMS,
        *,
        num_rounds: int = 1,
        **pressure: Any,
    ) -> ExactRun:
        return run(
            self.model.spec,
            self.make_runner,
            prompts or PROMPTS,
            params,
            Pressure(**pressure),
            num_rounds=num_rounds,
        )

    def few_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return how many blocks of 16 one request of so many tokens holds at most."""
        groups = [GroupSpec(window=group.window, num_sinks=group.num_sinks) for group in self.model.spec.kv_groups]
        return sum(group.num_blocks(num_tokens, 16, chunk) for group in groups)


def make_subject(cell: Cell) -> Subject:
    model = make_random_model(**SIZES, **SETTINGS[cell.setting])
    if cell.setting == "sparse":
        spec = with_sparse_blocks(model.spec, SPARSE_BLOCKS)
        model = RandomModel(spec=spec, program=emit_decoder(spec), weights=model.weights)
    if cell.runner == "reference":
        return Subject(cell, model, model.weights)
    return Subject(cell, model, pack_arrays(model.weights, model.program, weight_dtype="f32"))


def tokens(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 96, length).tolist()


PROMPTS = [tokens(length) for length in (3, 16, 40, 100, 130, 131, 200)]
# Leaves the longest one within a tile, and is long enough to fill that tile with tokens of its own.
PROMPTS.append([*PROMPTS[-1][:SHARED_TOKENS], *(tokens(40))])


@pytest.fixture(scope="module", params=CELLS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    return make_subject(request.param)


@pytest.fixture(scope="module")
def alone(subject: Subject) -> ExactRun:
    calm = subject.run()
    assert calm.max_requests_in_a_step == 1
    assert calm.metrics.num_hit_tokens == calm.metrics.num_preemptions == calm.num_copies == 0
    assert any(map(has_gap, calm.plans)) == subject.has_gap
    return calm


def has_gap(plan: StepPlan) -> bool:
    return any(NULL_BLOCK in table.block_ids for table in plan.tables)


def assert_same_bits(run: ExactRun, truth: ExactRun, *, of: slice = slice(None)) -> None:
    assert run.answers == truth.answers[of]
    assert run.kv_digests == truth.kv_digests[of]


def lengths_gone_back_from(run: ExactRun) -> list[int]:
    """Return the computed tokens that requests had when they lost some: a later step begins before there."""
    ends: dict[str, int] = {}
    lengths = []
    for plan in run.plans:
        for index, request_id in enumerate(plan.request_ids):
            if plan.start_positions[index] < ends.get(request_id, 0):
                lengths.append(ends[request_id])
            ends[request_id] = plan.start_positions[index] + plan.query_offsets[index + 1] - plan.query_offsets[index]
    return lengths


def test_company_changes_no_bit(subject: Subject, alone: ExactRun) -> None:
    batch = subject.run(max_num_seqs=8, max_num_batched_tokens=1024)

    assert batch.max_requests_in_a_step == len(PROMPTS)
    assert_same_bits(batch, alone)


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_change_no_bit(subject: Subject, alone: ExactRun, chunk: int) -> None:
    if chunk == 1 and subject.cell.runner == "reference":
        pytest.skip("slow there, and chunks of 7 meet the same edges")
    chunked = subject.run(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3))

    assert max(plan.num_tokens for plan in chunked.plans) <= chunk
    assert_same_bits(chunked, alone)


@pytest.mark.parametrize("block_size", [16, 48])
def test_hits_of_whole_blocks_change_no_bit(subject: Subject, block_size: int) -> None:
    """Prompts of a block and one token more: all but the last token is hit, and nothing is left to copy."""
    prompts = [tokens(num_blocks * 48 + 1) for num_blocks in (1, 2, 3)]
    calm = subject.run(prompts)

    warm = subject.run(prompts, block_size=block_size, is_caching=True, num_rounds=2)

    assert warm.metrics.num_hit_tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert warm.num_copies == 0
    hits = [plan for plan in warm.plans if plan.start_positions[0] == len(prompts[-1]) - 1]
    assert len(hits) == 1 and has_gap(hits[0]) == subject.has_gap, "of a window, a hit takes the last blocks alone"
    assert_same_bits(warm, calm)


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_tokens_copied_from_a_block_that_goes_on_otherwise_change_no_bit(
    subject: Subject, alone: ExactRun, block_size: int
) -> None:
    copied = subject.run(PROMPTS[-2:], block_size=block_size, is_caching=True)

    assert copied.metrics.num_hit_tokens == SHARED_TOKENS
    assert SHARED_TOKENS % block_size != 0 and copied.num_copies == len(subject.model.spec.kv_groups)
    assert_same_bits(copied, alone, of=slice(-2, None))


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_second_turn_that_copies_the_end_of_the_first_changes_no_bit(
    subject: Subject, alone: ExactRun, block_size: int
) -> None:
    first = PROMPTS[-2]
    answer = [token[0] for token in alone.answers[-2][0]]
    turns = [first, [*first, *answer, *tokens(30)]]
    calm = subject.run(turns)

    warm = subject.run(turns, block_size=block_size, is_caching=True)

    num_computed = len(first) + len(answer) - 1  # the last token was chosen and never computed
    assert num_computed % block_size != 0 and warm.num_copies > 0
    assert warm.metrics.num_hit_tokens == num_computed
    assert_same_bits(warm, calm)


def test_requests_that_start_alike_at_the_same_time_change_no_bit(subject: Subject, alone: ExactRun) -> None:
    """What one of them is computing, in chunks that end within blocks, the others wait for and hit."""
    together = subject.run([*PROMPTS[-2:], PROMPTS[-2]], max_num_seqs=3, max_num_batched_tokens=21, is_caching=True)

    assert together.max_requests_in_a_step == 3
    assert together.metrics.num_hit_tokens >= SHARED_TOKENS // 16 * 16 + len(PROMPTS[-2]) // 16 * 16
    assert together.answers == (*alone.answers[-2:], alone.answers[-2])
    assert together.kv_digests == (*alone.kv_digests[-2:], alone.kv_digests[-2])


@pytest.mark.parametrize("is_caching", [False, True], ids=["uncached", "cached"])
def test_preempted_and_resumed_requests_change_no_bit(subject: Subject, alone: ExactRun, is_caching: bool) -> None:
    squeezed = subject.run(
        num_blocks=subject.few_blocks(220, 64) + 4,
        max_model_len=220,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        is_caching=is_caching,
    )

    assert squeezed.metrics.num_preemptions > 0
    assert max(lengths_gone_back_from(squeezed)) > MOST_SEEN_TOKENS, "a request that left out tokens began again"
    assert (squeezed.metrics.num_hit_tokens > 0) == is_caching
    assert_same_bits(squeezed, alone)


@pytest.mark.parametrize("block_size", [24, 32, 48])
def test_block_size_changes_no_bit(subject: Subject, alone: ExactRun, block_size: int) -> None:
    if block_size % 16 and (subject.cell.runner == "native" or subject.cell.setting == "sparse"):
        pytest.skip("whole tiles only")
    other = subject.run(max_num_seqs=8, block_size=block_size, is_caching=True, num_rounds=2)

    assert other.metrics.num_hit_tokens > 0 and other.num_copies > 0
    assert_same_bits(other, alone)


def test_threads_change_no_bit(subject: Subject, alone: ExactRun) -> None:
    if subject.cell.runner == "reference":
        pytest.skip("the reference has no thread setting")

    assert_same_bits(subject.run(threads=2), alone)
    assert_same_bits(subject.run(threads=2, max_num_seqs=8, max_num_batched_tokens=64), alone)
    assert_same_bits(subject.run(threads=3, max_num_seqs=8), alone)


@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
def test_forks_equal_seeded_singles(subject: Subject, is_tight: bool) -> None:
    prompts = [prompt for prompt in PROMPTS if len(prompt) in {16, 40, 131}]
    params = SamplingParams(temperature=1.0, max_tokens=20, logprobs=3, n=3, seed=11)

    num_blocks = subject.few_blocks(151, 512) + 5 if is_tight else 256
    forked = subject.run(prompts, params, max_num_seqs=9, num_blocks=num_blocks, max_model_len=151)

    assert forked.num_copies > 0
    assert (forked.metrics.num_preemptions > 0) == is_tight
    for k in range(params.n):
        single = subject.run(prompts, SamplingParams(temperature=1.0, max_tokens=20, logprobs=3, seed=11 + k))
        assert [answers[k] for answers in forked.answers] == [answers[0] for answers in single.answers]
        assert [digests[k] for digests in forked.kv_digests] == [digests[0] for digests in single.kv_digests]
    assert all(len(set(answers)) == params.n for answers in forked.answers), "seeds differ, so answers do"


def test_contexts_of_several_splits_change_no_bit(subject: Subject) -> None:
    """Rows are folded in splits of 512 tokens, which threads share, and which forks visit together."""
    if subject.cell.runner == "reference":
        pytest.skip("its sums have no splits")
    prompts = [tokens(1100)]
    params = SamplingParams(temperature=1.0, max_tokens=12, logprobs=3, seed=5)
    calm = subject.run(prompts, params, max_num_batched_tokens=2048, max_model_len=1200)

    chunked = subject.run(prompts, params, max_num_batched_tokens=33, max_model_len=1200, threads=2)
    warm = subject.run(prompts, params, block_size=48, is_caching=True, num_rounds=2, max_model_len=1200, threads=3)
    several = replace(params, n=3)
    forked = subject.run(prompts, several, max_num_seqs=3, max_model_len=1200, threads=3)

    assert warm.metrics.num_hit_tokens == len(prompts[0]) - 1
    assert_same_bits(chunked, calm)
    assert_same_bits(warm, calm)
    for k in range(several.n):
        single = subject.run(prompts, replace(params, seed=5 + k), max_model_len=1200)
        assert forked.answers[0][k] == single.answers[0][0] and forked.kv_digests[0][k] == single.kv_digests[0][0]
    assert forked.max_requests_in_a_step == several.n and forked.answers[0][0] == calm.answers[0][0]


def test_all_of_it_at_once_changes_no_bit(subject: Subject, alone: ExactRun) -> None:
    everything = subject.run(
        num_blocks=subject.few_blocks(220, 48) + 5,
        max_model_len=220,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        is_caching=True,
        threads=2,
        num_rounds=2,
    )

    assert everything.metrics.num_preemptions > 0 and everything.metrics.num_hit_tokens > 0
    assert everything.max_requests_in_a_step > 2
    assert_same_bits(everything, alone)


# ---- what the cells rely on ----


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "dense"])
def test_what_is_not_read_would_have_mattered(setting: str) -> None:
    """Guards all tests above: a setting that changed nothing would be tested by nothing."""
    dense, less = (make_subject(Cell("native", "f16", name)).run() for name in ("dense", setting))

    for prompt, full, cut in zip(PROMPTS, dense.answers, less.answers, strict=True):
        if setting == "model window" or len(prompt) > MOST_SEEN_TOKENS:
            assert len(prompt) < 24 or full != cut
        elif len(prompt) + PARAMS.max_tokens <= 44:
            assert full == cut, "before anything is left out, nothing changes"


def test_every_dtype_answers_in_its_own_way() -> None:
    answers = [make_subject(Cell("native", dtype, "dense")).run().answers for dtype in DTYPES]
    skipping = make_subject(Cell("native", "int4", "dense", SKIPPED_LAYERS)).run().answers

    assert len({repr(each) for each in (*answers, skipping)}) == len(DTYPES) + 1
    assert [is_quantised(dtype) for dtype in DTYPES] == [False] * 3 + [True] * 3
    assert {layer >= NUM_DENSE_LAYERS for layer in SKIPPED_LAYERS} == {False, True}
