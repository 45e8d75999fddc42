"""Rotary frequencies against transformers' own initialisers."""

from __future__ import annotations

import math

import pytest

from octavo.models.config import spec_from_hf
from octavo.models.rope import attention_scaling, inverse_frequencies
from octavo.models.spec import Rope
from octavo.testing.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, TinyModel, make_config

REAL_LLAMA3 = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
CASES = {
    "default": (TinyModel(), {}),
    "wide heads": (TinyModel(head_dim=128, rope_theta=1e6), {}),
    "linear": (TinyModel(), LINEAR_ROPE),
    "llama3": (TinyModel(), LLAMA3_ROPE),
    "llama 3.1": (TinyModel(head_dim=128, rope_theta=500_000.0, max_position=131_072), REAL_LLAMA3),
    "llama 3.2": (TinyModel(head_dim=64, rope_theta=500_000.0, max_position=131_072), {**REAL_LLAMA3, "factor": 32.0}),
    "yarn": (TinyModel(max_position=256), YARN_ROPE),
    "qwen yarn": (
        TinyModel(head_dim=128, rope_theta=1e6, max_position=131_072),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    ),
    "yarn with betas": (TinyModel(max_position=256), {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 2.0}),
    "yarn untruncated": (TinyModel(max_position=256), {**YARN_ROPE, "truncate": False}),
    "yarn with attention factor": (TinyModel(max_position=256), {**YARN_ROPE, "attention_factor": 0.9}),
    "yarn with mscale": (TinyModel(max_position=256), {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn with half of mscale": (TinyModel(max_position=256), {**YARN_ROPE, "mscale": 0.7}),
    "yarn with equal bounds": (TinyModel(max_position=256), {**YARN_ROPE, "beta_fast": 1.0, "truncate": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_scaling_equal_transformers(name):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model, scaling = CASES[name]
    config = make_config(model) | {"rope_scaling": dict(scaling) or None}
    kind = scaling.get("rope_type", "default")
    initialisers = {**ROPE_INIT_FUNCTIONS, "default": LlamaRotaryEmbedding.compute_default_rope_parameters}

    wanted, wanted_scaling = initialisers[kind](LlamaConfig(**config))
    rope = spec_from_hf(config, where="config.json", name="tiny").rope

    assert inverse_frequencies(rope) == pytest.approx(wanted.tolist(), rel=2e-6)
    assert attention_scaling(rope) == pytest.approx(wanted_scaling, rel=1e-12)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_blends_between():
    plain = inverse_frequencies(Rope(rotary_dim=16))
    scaled = inverse_frequencies(
        Rope(
            rotary_dim=16,
            kind="llama3",
            factor=8.0,
            original_max_position=64,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
    )

    slowdown = [before / after for before, after in zip(plain, scaled, strict=True)]
    assert slowdown[0] == 1.0
    assert 1.0 < slowdown[2] < 8.0
    assert slowdown[4:] == pytest.approx([8.0] * 4)


def test_divisors_slow_each_pair_down_before_the_scaling():
    divisors = (1.0, 2.0, 4.0, 8.0)
    rope = Rope(rotary_dim=8, kind="linear", factor=2.0, freq_factors=divisors)

    expected = [10_000.0 ** (-2 * pair / 8) / divisor / 2 for pair, divisor in enumerate(divisors)]
    assert inverse_frequencies(rope) == pytest.approx(expected, rel=1e-15)


def test_no_rotation_turns_nothing():
    assert inverse_frequencies(Rope(rotary_dim=6, kind="none")) == (0.0, 0.0, 0.0)


def test_frequencies_have_double_precision():
    assert inverse_frequencies(Rope(rotary_dim=64, theta=1e5))[1] == math.pow(1e5, -2 / 64)
