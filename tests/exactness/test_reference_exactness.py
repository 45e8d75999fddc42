"""The invariance contract, on the reference runner: pressure changes no bit of an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.core.ports import Runner
from octavo.core.sampling import SamplingParams
from octavo.models.load import OpenedModel, open_model
from octavo.models.weights import WeightSource
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.runtime.reference_weights import read_reference_weights
from octavo.testing.exact_runs import ExactRun, Pressure, run
from octavo.testing.tiny_models import TinyModel, write_hf_model

LENGTHS = (1, 15, 16, 17, 31, 33, 50, 70)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5)


class Subject:
    """A tiny model, its prompts, and how to run them."""

    def __init__(self, model: OpenedModel, kv_cache_dtype: str) -> None:
        self.model = model
        self.kv_cache_dtype = kv_cache_dtype
        with WeightSource(model) as source:
            self._weights = read_reference_weights(source)
        rng = np.random.default_rng(7)
        vocab_size = model.spec.vocab_size
        self.prompts = [rng.integers(0, vocab_size, size=length).tolist() for length in LENGTHS]

    def make_runner(self, pressure: Pressure) -> Runner:
        return ReferenceRunner(
            self.model.spec,
            self.model.program,
            self._weights,
            num_blocks=pressure.num_blocks,
            block_size=pressure.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            poison=True,
        )

    def run(self, params=GREEDY, *, prompts=None, num_rounds=1, **pressure) -> ExactRun:
        return run(
            self.model.spec,
            self.make_runner,
            prompts or self.prompts,
            params,
            Pressure(**pressure),
            num_rounds=num_rounds,
        )


@pytest.fixture(scope="module", params=["llama-f32", "llama-f16", "qwen3-bf16"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    architecture, kv_cache_dtype = request.param.split("-")
    folder: Path = tmp_path_factory.mktemp(request.param)
    return Subject(open_model(write_hf_model(TinyModel(architecture=architecture), folder)), kv_cache_dtype)


@pytest.fixture(scope="module")
def alone(subject: Subject) -> ExactRun:
    """Each request by itself: the truth that every other run must equal."""
    calm = subject.run()
    assert calm.max_requests_in_a_step == 1
    assert calm.metrics.num_hit_tokens == calm.metrics.num_preemptions == calm.num_copies == 0
    return calm


def test_a_batch_changes_no_bit(subject: Subject, alone: ExactRun) -> None:
    batch = subject.run(max_num_seqs=8)

    assert batch.max_requests_in_a_step == len(LENGTHS)
    assert batch.answers == alone.answers


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_prefill_changes_no_bit(subject: Subject, alone: ExactRun, chunk: int) -> None:
    chunked = subject.run(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3))

    assert max(plan.num_tokens for plan in chunked.plans) <= chunk < max(LENGTHS)
    assert chunked.answers == alone.answers


def test_prefix_hits_and_copied_tokens_change_no_bit(subject: Subject, alone: ExactRun) -> None:
    hits = subject.run(is_caching=True, max_num_seqs=8, num_rounds=2)

    assert hits.metrics.num_hit_tokens > 0
    assert hits.num_copies > 0, "some hits end inside a block"
    assert hits.answers == alone.answers


@pytest.mark.parametrize("is_caching", [False, True], ids=["uncached", "cached"])
def test_preemption_changes_no_bit(subject: Subject, alone: ExactRun, is_caching: bool) -> None:
    squeezed = subject.run(max_num_seqs=8, num_blocks=14, is_caching=is_caching, max_model_len=128)

    assert squeezed.metrics.num_preemptions > 0
    assert squeezed.answers == alone.answers


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_size_changes_no_bit(subject: Subject, alone: ExactRun, block_size: int) -> None:
    other = subject.run(max_num_seqs=8, block_size=block_size, is_caching=True, num_rounds=2)

    assert other.metrics.num_hit_tokens > 0
    assert other.answers == alone.answers


@pytest.mark.parametrize("num_blocks", [256, 12], ids=["roomy", "tight"])
def test_forks_equal_seeded_singles(subject: Subject, num_blocks: int) -> None:
    """Four answers to one prompt share its blocks; each equals the answer of a request of its own."""
    params = SamplingParams(temperature=1.0, max_tokens=40, logprobs=5, n=4, seed=11)
    prompts = [prompt for prompt in subject.prompts if len(prompt) in {15, 16, 17, 31, 33}]

    forked = subject.run(params, prompts=prompts, max_num_seqs=8, num_blocks=num_blocks, max_model_len=128)

    assert forked.num_copies > 0
    assert (forked.metrics.num_preemptions > 0) == (num_blocks == 12)
    for index, prompt in enumerate(prompts):
        singles = [
            subject.run(SamplingParams(temperature=1.0, max_tokens=40, logprobs=5, seed=11 + k), prompts=[prompt])
            for k in range(4)
        ]
        assert forked.answers[index] == tuple(single.answers[0][0] for single in singles)
        assert len(set(forked.answers[index])) > 1, "seeds differ, so answers do"


def test_prompt_scores_do_not_depend_on_chunks_or_neighbours(subject: Subject) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=3)

    plain = subject.run(params)
    batch = subject.run(params, max_num_seqs=8)
    chunked = subject.run(params, max_num_batched_tokens=7, max_num_seqs=3)

    assert [len(scores) for scores in plain.prompt_scores] == [length - 1 for length in LENGTHS]
    assert batch.max_requests_in_a_step == len(LENGTHS)
    assert plain.prompt_scores == batch.prompt_scores == chunked.prompt_scores
    assert plain.answers == batch.answers == chunked.answers
