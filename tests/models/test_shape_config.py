"""Reading configurations as shapes: what is refused by name, and that no odd value is taken for a size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError, ModelFileError, UnsupportedModelError
from octavo.models.catalogue import find_model, list_models
from octavo.models.shape_config import known_architectures, shape_from_hf


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(dict(find_model(name).config))
    for key, value in changes.items():
        if value is ABSENT:
            config.pop(key, None)
        else:
            config[key] = value
    return config


ABSENT = object()


def read(name: str, **changes: Any):
    return shape_from_hf(config_of(name, **changes), where="config.json", name=name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-3-8b", {"architectures": ["MysteryForCausalLM"]}, "architectures names MysteryForCausalLM"),
        ("llama-3-8b", {"layer_types": ["linear_attention"] * 32}, "layer_types[0] is 'linear_attention'"),
        ("qwen3-8b", {"layer_types": ["full_attention"] * 35 + ["mystery"]}, "layer_types[35] is 'mystery'"),
        ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "layer_types[0] is 'chunked_attention'"),
        ("qwen3-next-80b-a3b", {"layer_types": ["sliding_attention"] * 48}, "layer_types[0] is 'sliding_attention'"),
        ("nemotron-3-nano", {"hybrid_override_pattern": "X" + "M" * 51}, "hybrid_override_pattern[0] is 'X'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek-v4-flash", {"compress_ratios": [7] * 43}, "compress_ratios[0] is 7"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim is 512"),
        ("llama-3-8b", {"quantization_config": {"quant_method": "mystery"}}, "quant_method is 'mystery'"),
    ],
)
def test_unknown_architecture_layer_or_scheme_is_refused_by_name(name, changes, message):
    with pytest.raises(UnsupportedModelError) as caught:
        read(name, **changes)

    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_refusal_of_an_architecture_lists_the_known_ones():
    with pytest.raises(UnsupportedModelError) as caught:
        read("llama-3-8b", architectures=["MysteryForCausalLM"])

    assert all(name in caught.value.because for name in known_architectures())
    assert len(known_architectures()) > 50


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-3-8b", {"architectures": ABSENT}, "architectures does not name"),
        ("llama-3-8b", {"hidden_size": ABSENT}, "hidden_size is missing"),
        ("llama-3-8b", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama-3-8b", {"num_hidden_layers": 10**6}, "1,000,000 layers"),
        ("llama-3-8b", {"num_attention_heads": 33}, "does not divide into 33 heads"),
        ("llama-3-8b", {"num_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ("llama-3-8b", {"num_key_value_heads": 64}, "32 attention heads cannot share 64"),
        ("qwen3-8b", {"head_dim": ABSENT}, "head_dim is missing"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
        ("gemma-2-2b", {"sliding_window": None}, "sliding_window is null"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types is not a list of 24"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("mimo-v2-flash", {"moe_layer_freq": [1]}, "moe_layer_freq is not a list of 48"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [0, 2]}, "hybrid_layer_pattern is not a list of 48"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period is 0"),
        ("kimi-linear-48b-a3b", {"linear_attn_config": {"num_heads": 32}}, "full_attn_layers is not a list"),
        ("kimi-linear-48b-a3b", {"linear_attn_config": None}, "linear_attn_config is None"),
        ("gpt-3", {"max_position_embeddings": ABSENT}, "max_position_embeddings is missing"),
    ],
)
def test_missing_or_impossible_size_is_an_error_that_names_the_field(name, changes, message):
    with pytest.raises(ModelFileError) as caught:
        read(name, **changes)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("gpt2", {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}),
        ("gpt-j-6b", {"n_layer": 28, "n_head": 16, "n_embd": 4096, "n_positions": 2048, "n_inner": None}),
        ("opt-125m", {"ffn_dim": 3072}),
        ("bloom-7b1", {"n_layer": 30, "n_head": 32, "n_embed": 4096, "seq_length": 2048}),
    ],
)
def test_old_names_of_sizes_mean_the_same(name, old):
    modern = (
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings")
        if "n_layer" in old
        else ()
    )
    config = config_of(name, **dict.fromkeys((*modern, "intermediate_size"), ABSENT), **old)

    assert shape_from_hf(config, where="", name=name).layers == read(name).layers
    assert shape_from_hf(config, where="", name=name).num_parameters == read(name).num_parameters


def test_text_part_takes_what_the_outer_object_says_for_the_whole():
    shape = read("gemma-3-4b")
    outer = read("qwen3.5-27b", tie_word_embeddings=True)

    assert (shape.dtype, shape.vocab_size, shape.uncounted) == ("bfloat16", 262_208, ("vision tower",))
    assert outer.is_tied and not any(tensor.role == "head" for tensor in outer.tensors)


def test_layers_that_read_the_cache_of_others_keep_nothing():
    kept = [layer.kv is not None for layer in read("gemma-4-26b", **GEMMA_SHARING).layers]

    assert kept == [True] * 20 + [False] * 10


GEMMA_SHARING = {"text_config": {**find_model("gemma-4-26b").config["text_config"], "num_kv_shared_layers": 10}}


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, [8192, 8192, 8192, None] * 12),
        ({"no_rope_layers": [1, 0] * 24}, [8192, None] * 24),
        ({"no_rope_layers": []}, [8192, 8192, 8192, None] * 12),
        ({"layer_types": ["chunked_attention", "full_attention"] * 24}, [8192, None] * 24),
        ({"attention_chunk_size": None}, [None] * 48),
        ({"no_rope_layer_interval": 2}, [8192, None] * 24),
    ],
)
def test_chunks_of_llama_4_are_in_the_layers_that_the_file_names(changes, chunks):
    text = {**find_model("llama-4-scout-17b-16e").config["text_config"], **changes}

    shape = read("llama-4-scout-17b-16e", text_config=text)

    assert [layer.kv.window for layer in shape.layers] == chunks


@pytest.mark.parametrize(
    ("name", "changes", "num_windowed"),
    [
        ("qwen2.5-7b", {"use_sliding_window": True, "max_window_layers": 20}, 8),
        ("qwen2.5-7b", {"use_sliding_window": True, "max_window_layers": 28}, 0),
        ("mistral-7b-v0.1", {"sliding_window": ABSENT}, 32),  # the default of its configuration class
        ("mistral-7b-v0.1", {"sliding_window": None}, 0),
        ("phi-3-mini-4k", {}, 32),
        ("phi-4", {}, 0),
        ("gpt-oss-20b", {"layer_types": ABSENT}, 12),
        ("gemma-2-2b", {"sliding_window_pattern": ABSENT}, 13),
        ("gemma-2-2b", {"layer_types": ["sliding_attention"] * 25 + ["full_attention"]}, 25),
    ],
)
def test_windows_are_in_the_layers_that_the_fields_of_each_family_mean(name, changes, num_windowed):
    assert sum(layer.kv.window is not None for layer in read(name, **changes).layers) == num_windowed


def test_dtype_is_what_the_file_says_and_old_files_without_it_are_float32():
    assert read("llama-2-7b").dtype == "float16"
    assert read("gpt2", torch_dtype=ABSENT).dtype == "float32"
    assert read("gpt-oss-20b", torch_dtype=ABSENT, dtype=ABSENT).dtype == "bfloat16"


def test_a_dtype_whose_bytes_are_not_known_is_refused_not_guessed():
    with pytest.raises(UnsupportedModelError, match=r"torch_dtype is 'float8_e4m3fn'"):
        read("llama-2-7b", torch_dtype="float8_e4m3fn")


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(2**31 - 2, 2**70),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 200), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@pytest.mark.parametrize("name", list_models())
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_odd_values_are_counted_or_refused_but_never_crash(name, data):
    config = config_of(name)
    part = config.get("text_config", config)
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        key = data.draw(st.sampled_from(sorted(part)), label="field")
        part[key] = data.draw(ODD_VALUES, label="value")

    try:
        shape = shape_from_hf(config, where="config.json", name=name)
    except ModelError as error:
        assert "config.json" in str(error)
    else:
        assert shape.num_parameters >= shape.num_active_parameters > 0
        assert len(shape.layers) >= 1
