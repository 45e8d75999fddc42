"""The invariance contract: batching, chunks, hits, copies, preemption, block size and threads change no bit.

Tokens, log-probabilities as floats and the stored keys and values are compared with `==`; each test asserts that the
pressure it relies on happened. Subjects are tiny random models on the reference runner, the same in every weight and KV
dtype on the native runner, and the real default model as shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.errors import OctavoError
from octavo.models.load import OpenedModel, open_model
from octavo.models.weights import WeightSource
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import pack_weights
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.runtime.reference_weights import read_reference_weights
from octavo.testing.exact_runs import ExactRun, KVReadingRunner, Pressure, run
from octavo.testing.real_model import find_real_model
from octavo.testing.tiny_models import TinyModel, write_hf_model

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 50, 70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5)
TINY_SUBJECTS = [
    "reference-llama-stored-f32",
    "reference-llama-stored-f16",
    "reference-qwen3-stored-bf16",
    *(f"native-llama-{weights}-f16" for weights in ("f32", "f16", "bf16", "int8", "int4")),
    "native-qwen2-int4-f32",
    "native-qwen3-stored-bf16",
    "reference-llama-stored-int4",
    "native-llama-int4-int8",
    "native-qwen3-stored-fp8_e4m3",
    "native-llama-f16-int4",
]


@dataclass
class Subject:
    """A model, prompts for it, and how to run them."""

    model: OpenedModel
    make_runner: Callable[[Pressure], KVReadingRunner]
    is_native: bool
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        vocab_size = self.model.spec.vocab_size
        self.prompts = [rng.integers(0, vocab_size, size=length).tolist() for length in LENGTHS]

    def run(
        self,
        params: SamplingParams = GREEDY,
        *,
        prompts: list[list[int]] | None = None,
        num_rounds: int = 1,
        **pressure: Any,
    ) -> ExactRun:
        return run(
            self.model.spec,
            self.make_runner,
            prompts or self.prompts,
            params,
            Pressure(**pressure),
            num_rounds=num_rounds,
        )


def reference_subject(model: OpenedModel, kv_cache_dtype: str) -> Subject:
    with WeightSource(model) as source:
        weights = read_reference_weights(source)

    def make_runner(pressure: Pressure) -> ReferenceRunner:
        return ReferenceRunner(
            model.spec,
            model.program,
            weights,
            num_blocks=pressure.num_blocks,
            block_size=pressure.block_size,
            kv_cache_dtype=kv_cache_dtype,
            poison=True,
        )

    return Subject(model, make_runner, is_native=False)


def native_subject(model: OpenedModel, weight_dtype: str, kv_cache_dtype: str) -> Subject:
    with WeightSource(model) as source:
        weights = pack_weights(source.read_all(), model.program, weight_dtype=weight_dtype)

    def make_runner(pressure: Pressure) -> NativeRunner:
        return NativeRunner(
            model.spec,
            model.program,
            weights,
            num_blocks=pressure.num_blocks,
            block_size=pressure.block_size,
            kv_cache_dtype=kv_cache_dtype,
            threads=pressure.threads,
            max_num_batched_tokens=pressure.max_num_batched_tokens,
            max_num_seqs=pressure.max_num_seqs,
            poison=True,
        )

    return Subject(model, make_runner, is_native=True)


@pytest.fixture(scope="module", params=TINY_SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    runner, architecture, weight_dtype, kv_cache_dtype = request.param.split("-")
    folder: Path = tmp_path_factory.mktemp(request.param)
    model = open_model(write_hf_model(TinyModel(architecture=architecture), folder))
    if runner == "reference":
        return reference_subject(model, kv_cache_dtype)
    return native_subject(model, weight_dtype, kv_cache_dtype)


@pytest.fixture(scope="module")
def alone(subject: Subject) -> ExactRun:
    """Each request by itself: the truth that every other run must equal."""
    calm = subject.run()
    assert calm.max_requests_in_a_step == 1
    assert calm.metrics.num_hit_tokens == calm.metrics.num_preemptions == calm.num_copies == 0
    return calm


def assert_same_bits(run: ExactRun, truth: ExactRun) -> None:
    assert run.answers == truth.answers
    assert run.kv_digests == truth.kv_digests


def test_a_batch_changes_no_bit(subject: Subject, alone: ExactRun) -> None:
    batch = subject.run(max_num_seqs=16)

    assert batch.max_requests_in_a_step == len(LENGTHS)
    assert_same_bits(batch, alone)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill_changes_no_bit(subject: Subject, alone: ExactRun, chunk: int) -> None:
    chunked = subject.run(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3))

    assert max(plan.num_tokens for plan in chunked.plans) <= chunk < max(LENGTHS)
    assert_same_bits(chunked, alone)


def test_prefix_hits_and_copied_tokens_change_no_bit(subject: Subject, alone: ExactRun) -> None:
    hits = subject.run(is_caching=True, max_num_seqs=16, num_rounds=2)

    assert hits.metrics.num_hit_tokens > 0
    assert hits.num_copies > 0, "some hits end inside a block"
    assert_same_bits(hits, alone)


@pytest.mark.parametrize("is_caching", [False, True], ids=["uncached", "cached"])
def test_preemption_changes_no_bit(subject: Subject, alone: ExactRun, is_caching: bool) -> None:
    squeezed = subject.run(max_num_seqs=16, num_blocks=14, is_caching=is_caching, max_model_len=128)

    assert squeezed.metrics.num_preemptions > 0
    assert_same_bits(squeezed, alone)


@pytest.mark.parametrize("block_size", [8, 16, 32, 48])
def test_block_size_changes_no_bit(subject: Subject, alone: ExactRun, block_size: int) -> None:
    if subject.is_native and block_size % 16:
        pytest.skip("native blocks are multiples of 16 tokens")
    other = subject.run(max_num_seqs=16, block_size=block_size, is_caching=True, num_rounds=2)

    assert other.metrics.num_hit_tokens > 0
    assert_same_bits(other, alone)


def test_threads_change_no_bit(subject: Subject, alone: ExactRun) -> None:
    if not subject.is_native:
        pytest.skip("the reference has no thread setting; its products are checked under 1 and 2 BLAS threads")

    assert_same_bits(subject.run(threads=2), alone)
    assert_same_bits(subject.run(threads=2, max_num_seqs=16, max_num_batched_tokens=64), alone)
    assert_same_bits(subject.run(threads=3, max_num_seqs=16), alone)


@pytest.mark.parametrize("num_blocks", [256, 12], ids=["roomy", "tight"])
def test_forks_equal_seeded_singles(subject: Subject, num_blocks: int) -> None:
    """Four answers to one prompt share its blocks; each equals the answer of a request of its own."""
    prompts = [prompt for prompt in subject.prompts if len(prompt) in {15, 16, 17, 31, 33}]
    params = SamplingParams(temperature=1.0, max_tokens=40, logprobs=5, n=4, seed=11)

    forked = subject.run(params, prompts=prompts, max_num_seqs=8, num_blocks=num_blocks, max_model_len=128)

    assert forked.num_copies > 0
    assert (forked.metrics.num_preemptions > 0) == (num_blocks == 12)
    for k in range(4):
        single = subject.run(SamplingParams(temperature=1.0, max_tokens=40, logprobs=5, seed=11 + k), prompts=prompts)
        assert [answers[k] for answers in forked.answers] == [answers[0] for answers in single.answers]
        assert [digests[k] for digests in forked.kv_digests] == [digests[0] for digests in single.kv_digests]
    assert all(len(set(answers)) == 4 for answers in forked.answers), "seeds differ, so answers do"


def test_prompt_scores_do_not_depend_on_chunks_or_neighbours(subject: Subject) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=3)

    plain = subject.run(params)
    batch = subject.run(params, max_num_seqs=16)
    chunked = subject.run(params, max_num_batched_tokens=7, max_num_seqs=3)

    assert [len(scores) for scores in plain.prompt_scores] == [length - 1 for length in LENGTHS]
    assert batch.max_requests_in_a_step == len(LENGTHS)
    assert plain.prompt_scores == batch.prompt_scores == chunked.prompt_scores
    assert_same_bits(batch, plain)
    assert_same_bits(chunked, plain)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=5, max_tokens=16, logprobs=2),
        SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.3, seed=6, max_tokens=16, logprobs=2),
        SamplingParams(presence_penalty=0.8, frequency_penalty=0.5, seed=7, max_tokens=16, logprobs=2),
    ],
    ids=["top-p-k", "min-p-repetition", "presence-frequency"],
)
def test_sampled_answers_do_not_depend_on_company_hits_or_preemption(subject: Subject, params: SamplingParams) -> None:
    """Penalties count the whole prompt, also the part that was a hit (OPN-32); draws depend on seed and position."""
    plain = subject.run(params)

    warm = subject.run(params, is_caching=True, max_num_seqs=16, num_rounds=2)
    squeezed = subject.run(params, max_num_seqs=16, num_blocks=10, max_model_len=96)

    assert warm.metrics.num_hit_tokens > 0 and squeezed.metrics.num_preemptions > 0
    assert_same_bits(warm, plain)
    assert_same_bits(squeezed, plain)


# ---- the real model, as shipped: Q4_1 weights, int8 activations, f16 KV ----


@pytest.fixture(scope="module")
def shipped() -> Subject:
    try:
        path = find_real_model()
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")
    subject = native_subject(open_model(path), "stored", "f16")
    rng = np.random.default_rng(1)
    lengths = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, *rng.integers(2, 100, size=21).tolist(), 600]
    vocab_size = subject.model.spec.vocab_size
    subject.prompts = [rng.integers(0, vocab_size, size=length).tolist() for length in lengths]
    return subject


@pytest.fixture(scope="module")
def shipped_alone(shipped: Subject) -> ExactRun:
    assert len(shipped.prompts) == 32
    return shipped.run(SHORT, threads=2)


SHORT = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)


def test_the_shipped_model_answers_the_same_in_a_batch_of_32(shipped: Subject, shipped_alone: ExactRun) -> None:
    batch = shipped.run(SHORT, max_num_seqs=32, threads=2, max_num_batched_tokens=2048)

    assert batch.max_requests_in_a_step == 32
    assert_same_bits(batch, shipped_alone)
    assert_same_bits(shipped.run(SHORT, max_num_seqs=32, threads=1), shipped_alone)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_the_shipped_model_answers_the_same_in_chunks(shipped: Subject, shipped_alone: ExactRun, chunk: int) -> None:
    # One token a step is slow: there the first prompts must do, which end around the block boundaries.
    num_prompts = 9 if chunk == 1 else len(shipped.prompts)

    chunked = shipped.run(
        SHORT,
        prompts=shipped.prompts[:num_prompts],
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 5),
        threads=2,
    )

    assert max(plan.num_tokens for plan in chunked.plans) <= chunk
    assert chunked.answers == shipped_alone.answers[:num_prompts]
    assert chunked.kv_digests == shipped_alone.kv_digests[:num_prompts]


def test_the_shipped_model_answers_the_same_with_hits_and_other_blocks(
    shipped: Subject, shipped_alone: ExactRun
) -> None:
    for block_size in (16, 32):
        hits = shipped.run(
            SHORT, is_caching=True, max_num_seqs=32, num_rounds=2, block_size=block_size, threads=2, num_blocks=400
        )
        assert hits.metrics.num_hit_tokens > 0 and hits.num_copies > 0
        assert_same_bits(hits, shipped_alone)


def test_the_shipped_model_answers_the_same_after_preemption(shipped: Subject, shipped_alone: ExactRun) -> None:
    squeezed = shipped.run(SHORT, max_num_seqs=32, num_blocks=60, max_model_len=640, threads=2)

    assert squeezed.metrics.num_preemptions > 0
    assert_same_bits(squeezed, shipped_alone)


def test_the_shipped_model_forks_as_seeded_singles(shipped: Subject) -> None:
    prompts = shipped.prompts[1:4]
    params = SamplingParams(temperature=1.0, max_tokens=12, logprobs=3, n=4, seed=3)

    forked = shipped.run(params, prompts=prompts, max_num_seqs=12, threads=2)

    assert forked.num_copies > 0
    for k in range(4):
        single = shipped.run(SamplingParams(temperature=1.0, max_tokens=12, logprobs=3, seed=3 + k), prompts=prompts)
        assert [answers[k] for answers in forked.answers] == [answers[0] for answers in single.answers]
        assert [digests[k] for digests in forked.kv_digests] == [digests[0] for digests in single.kv_digests]
