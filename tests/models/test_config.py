"""Hugging Face configurations: what is read, what is refused, what is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.config import spec_from_hf
from octavo.models.spec import KVGroup, Rope
from octavo.testing.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, TinyModel, make_config

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_models" / "models.json").read_text())
ABSENT = object()


def read(architecture="llama", *, model=None, modern_rope=False, **changes):
    config = make_config(model or TinyModel(architecture=architecture), modern_rope=modern_rope)
    for name, value in changes.items():
        if value is ABSENT:
            config.pop(name, None)
        else:
            config[name] = value
    return spec_from_hf(config, where="config.json", name="tiny")


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_of_published_models_is_exact(name):
    config = PUBLISHED[name]

    spec = spec_from_hf(config["config"], where=name, name=name)

    assert spec.num_parameters == config["num_parameters"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_kv_bytes_per_token_of_published_models_follow_from_the_spec(name):
    config = PUBLISHED[name]

    spec = spec_from_hf(config["config"], where=name, name=name)

    num_kept_layers = sum(len(group.layers) for group in spec.kv_groups)
    assert 2 * num_kept_layers * spec.num_kv_heads * spec.head_dim * 2 == config["kv_bytes_per_token_16_bit"]


def test_sizes_are_taken_as_they_are():
    spec = read(model=TinyModel(num_heads=8, num_kv_heads=1, head_dim=24, tie_embeddings=True, num_layers=3))

    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.num_layers) == (8, 1, 24, 3)
    assert (spec.architecture, spec.name, spec.tie_embeddings) == ("llama", "tiny", True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (0, (2,))
    assert spec.kv_groups == (KVGroup(layers=(0, 1, 2)),)


def test_family_decides_where_biases_and_norms_are():
    flags = {
        name: (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm)
        for name, spec in {
            "llama": read("llama"),
            "biased llama": read("llama", attention_bias=True, mlp_bias=True),
            "mistral": read("mistral"),
            "qwen2": read("qwen2"),
            "qwen3": read("qwen3"),
            "biased qwen3": read("qwen3", attention_bias=True),
        }.items()
    }

    assert flags == {
        "llama": (False, False, False, False),
        "biased llama": (True, True, True, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
        "biased qwen3": (True, True, False, True),
    }


def test_old_files_leave_out_what_has_a_default():
    spec = read(
        num_key_value_heads=ABSENT,
        head_dim=ABSENT,
        rope_theta=ABSENT,
        rope_scaling=ABSENT,
        tie_word_embeddings=ABSENT,
        attention_bias=ABSENT,
        mlp_bias=ABSENT,
        hidden_act=ABSENT,
        eos_token_id=ABSENT,
        bos_token_id=None,
    )

    assert (spec.num_kv_heads, spec.head_dim) == (4, 16)
    assert spec.rope == Rope(theta=10_000.0, rotary_dim=16)
    assert (spec.tie_embeddings, spec.eos_token_ids, spec.bos_token_id) == (False, (), None)


def test_several_ends_of_sequence_are_kept_once_each():
    assert read(eos_token_id=[5, 2, 5]).eos_token_ids == (5, 2)


@pytest.mark.parametrize("rope", [{}, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE], ids=["default", "linear", "llama3", "yarn"])
def test_both_spellings_of_the_rotary_scaling_mean_the_same(rope):
    model = TinyModel(rope_scaling=rope, rope_theta=50_000.0)

    old, new = read(model=model), read(model=model, modern_rope=True)

    assert old.rope == new.rope
    assert old.rope.theta == 50_000.0
    assert old.rope.kind == rope.get("rope_type", "default")


def test_type_is_the_older_name_of_rope_type():
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope.factor == 2.0


def test_yarn_attention_factor_is_resolved_when_read():
    given = read(rope_scaling={**YARN_ROPE, "attention_factor": 1.5}).rope
    usual = read(rope_scaling=YARN_ROPE).rope
    scaled = read(rope_scaling={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}).rope
    derived = read(rope_scaling={"type": "yarn", "original_max_position_embeddings": 512}).rope

    assert given.attention_factor == 1.5
    assert usual.attention_factor == pytest.approx(1.1386294361)
    assert scaled.attention_factor == 1.0
    assert derived.factor == 2048 / 512


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 64}, [64, 64]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("mistral", {"sliding_window": ABSENT}, [4096, 4096]),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, [None, None]),
        ("qwen2", {"sliding_window": 64}, [None, None]),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, [64, 64]),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [None, 64]),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, [None, None]),
        ("qwen3", {"layer_types": ["full_attention", "full_attention"]}, [None, None]),
        ("llama", {"sliding_window": None}, [None, None]),
    ],
)
def test_window_of_each_layer_is_what_transformers_gives_it(architecture, changes, windows):
    spec = read(architecture, **changes)

    by_layer = {layer: group.window for group in spec.kv_groups for layer in group.layers}
    assert [by_layer[layer] for layer in range(2)] == windows
    assert spec.sliding_window == next((window for window in windows if window), None)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "architectures names GemmaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "rope_scaling.type is 'mrope'"),
        ("llama", {"rope_scaling": {**LINEAR_ROPE, "alpha": 2}}, "rope_scaling.alpha is 2"),
        ("llama", {"rope_scaling": {**LINEAR_ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention is {}"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types[1] is 'linear_attention'"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types[1] is 'sliding_attention'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_field_and_value(architecture, changes, message):
    with pytest.raises(UnsupportedModelError) as caught:
        read(architecture, **changes)

    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"hidden_size": ABSENT}, "hidden_size is missing"),
        ("llama", {"vocab_size": None}, "vocab_size is missing"),
        ("llama", {"architectures": ABSENT}, "architectures does not name"),
        ("llama", {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures does not name"),
        ("qwen3", {"head_dim": ABSENT}, "head_dim is missing"),
        ("mistral", {"num_key_value_heads": ABSENT}, "num_key_value_heads is missing"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama", {"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama", {"num_hidden_layers": 10**6}, "1,000,000 layers"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'"),
        ("llama", {"vocab_size": 10**3000}, "vocab_size is a huge number"),
        ("llama", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None}, "does not divide into 6"),
        ("llama", {"head_dim": 15}, "heads have 15 dimensions"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0"),
        ("llama", {"rope_theta": 1.0}, "rope_theta is 1"),
        ("llama", {"rope_theta": 10**400}, "rope_theta is a huge number"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ("llama", {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "not below high_freq_factor"),
        ("llama", {"rope_scaling": {**YARN_ROPE, "beta_fast": 0.5}}, "beta_fast is 0.5, below beta_slow, 1"),
        ("llama", {"rope_scaling": LINEAR_ROPE, "rope_parameters": YARN_ROPE}, "say different things"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ("llama", {"eos_token_id": 512}, "eos_token_id names token 512"),
        ("llama", {"eos_token_id": [2, -1]}, "eos_token_id names token -1"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types is not a list of 2"),
    ],
)
def test_odd_value_is_an_error_that_names_the_field(architecture, changes, message):
    with pytest.raises(ModelFileError) as caught:
        read(architecture, **changes)

    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
