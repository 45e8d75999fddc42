"""Native products in every kind of weight against dense float32 arithmetic on the weights that the file stands for.

    f16, bf16    weights are widened exactly, so the tolerance is that of the float32 tests
    quantised    activations are rounded to 8 bits per row and group of 32, and that is the only difference. A dense
                 model that rounds them alike is as close as float32 to float32; from one that does not, logits are
                 about 2 % of their standard deviation away (each product on the way adds some 0.5 %)

A rounding that falls on the other side of a tie, because sums were added in another order, shows downstream as much as
rounding itself. So the close comparison is of short texts, most of which have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.models.load import open_model
from octavo.models.program import Linear
from octavo.models.weights import WeightSource
from octavo.runtime.divergence import log_softmax
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import pack_weights
from octavo.runtime.reference_linear import quantise_rows
from octavo.testing.dense_model import DenseModel
from octavo.testing.parity import tolerance
from octavo.testing.scored_text import num_blocks_for, score_text
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel

BLOCK_SIZE = 16
LONGEST = 200
NUM_SHORT_TEXTS, SHORT = 16, 4
FLOAT_KINDS = ("f16", "bf16")
QUANTISED_KINDS = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")


@dataclass(frozen=True)
class Subject:
    """One file, read natively and densely, the latter with activations as they are and rounded."""

    native: NativeRunner
    exact: DenseModel
    rounded: DenseModel

    def native_logprobs(self, token_ids):
        return score_text(self.native, self.exact.model.spec, token_ids, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def architecture(request):
    return request.param


@pytest.fixture
def make_subject(architecture, tmp_path):
    def make(kind: str) -> Subject:
        model = TinyModel(
            architecture=architecture, hidden_size=256, intermediate_size=512, num_layers=2, weight_std=0.06
        )
        opened = open_model(write_gguf_model(model, tmp_path / "tiny.gguf", kind=kind))
        assert opened.tensors["layers.1.down"].kind == kind
        with WeightSource(opened) as source:
            values = {tensor.name: tensor.to_f32() for tensor in source.read_all()}
        with WeightSource(opened) as source:
            packed = pack_weights(source.read_all(), opened.program)
        runner = NativeRunner(
            opened.spec,
            opened.program,
            packed,
            num_blocks=num_blocks_for(opened.spec, LONGEST, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            kv_cache_dtype="f32",
            threads=2,
            max_num_batched_tokens=LONGEST,
            max_num_seqs=1,
            poison=True,
        )
        return Subject(runner, DenseModel(opened, values), DenseModel(opened, values, product_input=rounded))

    return make


def rounded(_op: Linear, x):
    numbers, scales = quantise_rows(x)
    return (numbers.astype(np.float32) * scales[..., None]).reshape(x.shape)


def tokens(length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, 512, length).tolist()


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_float_weights_are_multiplied_as_float32(make_subject, kind):
    subject = make_subject(kind)

    for length in (1, 33, LONGEST):
        wanted = subject.exact.logits(tokens(length))
        found = subject.native_logprobs(tokens(length))
        assert np.abs(found - log_softmax(wanted)).max() <= tolerance(wanted), f"at length {length}"


@pytest.mark.parametrize("kind", QUANTISED_KINDS)
def test_quantised_weights_meet_a_dense_model_that_rounds_activations_alike(make_subject, kind):
    subject = make_subject(kind)

    num_equal = 0
    for seed in range(NUM_SHORT_TEXTS):
        wanted = subject.rounded.logits(tokens(SHORT, seed))
        found = subject.native_logprobs(tokens(SHORT, seed))
        num_equal += bool(np.abs(found - log_softmax(wanted)).max() <= tolerance(wanted))

    assert num_equal >= NUM_SHORT_TEXTS // 2


@pytest.mark.parametrize("kind", QUANTISED_KINDS)
def test_quantised_weights_are_as_far_from_float32_as_rounded_activations_explain(make_subject, kind):
    subject = make_subject(kind)
    logits = subject.exact.logits(tokens(LONGEST))
    spread = rms(logits - logits.mean(axis=1, keepdims=True))

    error = rms(subject.native_logprobs(tokens(LONGEST)) - log_softmax(logits)) / spread
    explained = rms(log_softmax(subject.rounded.logits(tokens(LONGEST))) - log_softmax(logits)) / spread

    assert 0.01 < error < 0.03
    assert error == pytest.approx(explained, rel=0.1)
