"""The invariance contract for what sets families apart: experts, windows in groups, caps, layer norms, wide norms.

Experts are the trap: rows that go to one expert are multiplied together, and with whom depends on the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.models.spec import Mixture, Rope
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.testing.exact_runs import ExactRun, Pressure, run
from octavo.testing.native_probe import pack_arrays
from octavo.testing.random_weights import RandomModel, make_random_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "experts": {
        "mixture": Mixture(num_experts=5, num_active=2, expert_size=32, is_normalised=True),
        "windows": (None, 24),
    },
    "caps and windows": {
        "windows": (24, None, 24, None),
        "norm_places": "both",
        "activation": "gelu_tanh",
        "embed_scale": 8.0,
        "attention_softcap": 2.0,
        "logits_softcap": 3.0,
        "qk_norm": True,
        "local_rope": Rope(theta=100.0, rotary_dim=16),
    },
    "layer norms and positions": {
        "windows": (None, None),
        "has_layer_norm": True,
        "has_learned_positions": True,
        "has_fused_qkv": True,
        "has_gate": False,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "rope": Rope(kind="none"),
        "num_kv_heads": 1,
    },
    "a window and sinks": {"windows": (None, None), "window_and_sinks": (20, 5), "attention_softcap": 2.0},
    "a window and many sinks": {"windows": (None, None), "window_and_sinks": (7, 21), "rope": Rope(rotary_dim=8)},
    "norms behind": {
        "windows": (None, None),
        "norm_places": "after",
        "qk_norm": True,
        "qk_norm_spans_heads": True,
        "rope": Rope(rotary_dim=8),
    },
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
LENGTHS = (1, 15, 16, 17, 33, 60)


class Subject:
    """A random model of a family on one of the runners."""

    def __init__(self, family: str, runner: str, weight_dtype: str) -> None:
        self.model: RandomModel = make_random_model(**SIZES | FAMILIES[family])
        self.runner = runner
        self.weight_dtype = weight_dtype
        rng = np.random.default_rng(3)
        self.prompts = [rng.integers(0, self.model.spec.vocab_size, length).tolist() for length in LENGTHS]

    def make_runner(self, pressure: Pressure) -> Any:
        spec, program, weights = self.model.spec, self.model.program, self.model.weights
        options = {"num_blocks": pressure.num_blocks, "block_size": pressure.block_size, "kv_cache_dtype": "f16"}
        if self.runner == "reference":
            return ReferenceRunner(spec, program, weights, poison=True, **options)
        return NativeRunner(
            spec,
            program,
            pack_arrays(weights, program, weight_dtype=self.weight_dtype),
            threads=pressure.threads,
            max_num_batched_tokens=pressure.max_num_batched_tokens,
            max_num_seqs=pressure.max_num_seqs,
            poison=True,
            **options,
        )

    def run(self, *, num_rounds: int = 1, **pressure: Any) -> ExactRun:
        return run(self.model.spec, self.make_runner, self.prompts, PARAMS, Pressure(**pressure), num_rounds=num_rounds)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.mark.parametrize(
    ("runner", "weight_dtype"), [("reference", "f32"), ("native", "f32"), ("native", "f16"), ("native", "int8")]
)
def test_company_chunks_hits_preemption_blocks_and_threads_change_no_bit(family, runner, weight_dtype):
    subject = Subject(family, runner, weight_dtype)
    alone = subject.run()

    batch = subject.run(max_num_seqs=8)
    chunked = subject.run(max_num_batched_tokens=7, max_num_seqs=3)
    warm = subject.run(max_num_seqs=8, is_caching=True, num_rounds=2)
    squeezed = subject.run(max_num_seqs=8, num_blocks=5 * len(subject.model.spec.kv_groups), max_model_len=80)
    wide = subject.run(max_num_seqs=8, block_size=32, threads=2, max_num_batched_tokens=64)

    assert batch.max_requests_in_a_step == len(LENGTHS)
    assert warm.metrics.num_hit_tokens > 0
    assert squeezed.metrics.num_preemptions > 0
    for other in (batch, chunked, warm, squeezed, wide):
        assert other.answers == alone.answers
        assert other.kv_digests == alone.kv_digests
    assert len({answer for answers in alone.answers for answer in answers}) > 1, "answers depend on prompts"


def test_rows_of_a_step_spread_over_several_experts():
    """Guards the test above: with one expert for all there would be nothing to mix up."""
    subject = Subject("experts", "native", "f32")
    runner = subject.make_runner(Pressure(max_num_seqs=8))
    seen: set[int] = set()

    def watching(_pressure: Pressure) -> Any:
        return runner

    run(subject.model.spec, watching, subject.prompts, PARAMS, Pressure(max_num_seqs=8))
    seen.update(runner.read_buffer("routes", 4)[:, :2].astype(int).ravel().tolist())

    assert len(seen) > 2
