"""GGUF files of models that Octavo does not run: counted as their configurations are, or refused.

Metadata is made from published configurations, in the words of the format; tensors are made up to the published count.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.catalogue import find_model
from octavo.models.gguf_file import GgufHeader
from octavo.models.gguf_shape import shape_from_gguf
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.models.tensor_entry import FileStamp, TensorEntry

MODELS = {
    "google/gemma-2b": "gemma",
    "google/gemma-2-9b": "gemma2",
    "openai/gpt-oss-20b": "gpt-oss",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek2",
    "deepseek-ai/DeepSeek-V3": "deepseek2",
    "moonshotai/Kimi-K2-Instruct": "deepseek2",
    "allenai/OLMoE-1B-7B-0924": "olmoe",
    "allenai/OLMo-2-1124-7B": "olmo2",
    "ibm-granite/granite-3.1-2b-instruct": "granite",
    "HuggingFaceTB/SmolLM3-3B": "smollm3",
    "microsoft/phi-2": "phi2",
    "microsoft/Phi-3-mini-4k-instruct": "phi3",
    "Qwen/Qwen1.5-MoE-A2.7B": "qwen2moe",
    "Qwen/Qwen3-30B-A3B": "qwen3moe",
    "mistralai/Mistral-7B-v0.1": "llama",
    "mistralai/Mixtral-8x7B-v0.1": "llama",
    "meta-llama/Meta-Llama-3-8B": "llama",
}
KEYS = {
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "context_length": ("max_position_embeddings",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "rope.dimension_count": ("qk_rope_head_dim",),
    "expert_count": ("n_routed_experts", "num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace",),
}


def published(name: str) -> ModelShape:
    return shape_from_hf(find_model(name).config, where=name, name=name)


def header_of(name: str, **changes: Any) -> GgufHeader:
    """Return the header that a converted model would have."""
    config, architecture = find_model(name).config, MODELS[name]
    fields = {
        key: next((config[each] for each in names if config.get(each) is not None), None) for key, names in KEYS.items()
    }
    if architecture == "deepseek2":
        fields["attention.key_length"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        fields["attention.value_length"] = config["v_head_dim"]
    if architecture == "qwen3moe" or config.get("use_sliding_window") is False:
        fields["attention.sliding_window"] = None
    metadata = {f"{architecture}.{key}": value for key, value in (fields | changes).items() if value is not None}
    shape = published(name)
    shapes = {"token_embd.weight": (shape.vocab_size, shape.hidden_size)}
    if not shape.is_tied:
        shapes["output.weight"] = (shape.vocab_size, shape.hidden_size)
    for tensor in shape.tensors:
        shapes |= marks_of(tensor.name, tensor.rows, tensor.columns, tensor.count // max(1, len(tensor.layers)))
    rest = shape.num_parameters - sum(map(prod, shapes.values()))
    assert rest > 0, "what is named is a part of the model"
    shapes["blk.0.rest"] = (1, rest)
    return GgufHeader(
        path=Path(f"{architecture}.gguf"),
        version=3,
        metadata={"general.architecture": architecture, **metadata},
        tensors={key: entry(key, each) for key, each in shapes.items()},
    )


def marks_of(name: str, rows: int, columns: int, per_layer: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor of the format whose presence or width says something, for a counted one."""
    match name.removeprefix("layers.*."):
        case "experts.*.up_proj.weight":
            return {"blk.1.ffn_up_exps.weight": (per_layer, rows, columns)}
        case "shared_expert.up_proj.weight":
            return {"blk.1.ffn_up_shexp.weight": (rows, columns)}
        case "q_proj.bias":
            return {"blk.0.attn_q.bias": (1, columns)}
        case "router.bias":
            return {"blk.1.exp_probs_b.bias": (1, columns)}
    return {}


def entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    stamp = FileStamp(size_bytes=0, modified_ns=0)
    return TensorEntry(name=name, shape=shape, kind="f16", path=Path("x"), offset_bytes=0, num_bytes=0, stamp=stamp)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_counted_as_the_configuration_it_came_from(name):
    wanted, found = published(name), shape_from_gguf(header_of(name), name=name)

    assert [(layer.kv, layer.state) for layer in found.layers] == [(each.kv, each.state) for each in wanted.layers]
    assert found.num_parameters == wanted.num_parameters
    assert (found.num_heads, found.hidden_size, found.vocab_size) == (
        wanted.num_heads,
        wanted.hidden_size,
        wanted.vocab_size,
    )
    assert found.max_position == wanted.max_position


def test_layers_of_a_draft_model_are_left_out():
    name = "deepseek-ai/DeepSeek-V3"
    header = header_of(name, block_count=62, nextn_predict_layers=1)
    extra = entry("blk.61.nextn.eh_proj.weight", (1 << 17, 1 << 17))

    found = shape_from_gguf(replace(header, tensors={**header.tensors, extra.name: extra}), name=name)

    assert found.layers == published(name).layers


def test_widths_of_absorbed_projections_are_read_under_their_own_names():
    changes = {"attention.key_length": 576, "attention.value_length": 512, "attention.head_count_kv": 1}
    own = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    found = shape_from_gguf(header_of("deepseek-ai/DeepSeek-V3", **changes, **own), name="v3")
    assert found.layers == published("deepseek-ai/DeepSeek-V3").layers


@pytest.mark.parametrize("pattern", [2, [layer % 2 == 0 for layer in range(42)]])
def test_a_pattern_of_windows_that_the_file_says_counts(pattern):
    name = "google/gemma-2-9b"
    found = shape_from_gguf(header_of(name, **{"attention.sliding_window_pattern": pattern}), name=name)
    assert found.layers == published(name).layers


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("google/gemma-2b", {"feed_forward_length": 8192}, "its tensors hold"),
        ("google/gemma-2b", {"block_count": 24}, "its tensors hold"),
        ("google/gemma-2b", {"attention.head_count_kv": [1, 2] * 9}, "layers of different sizes"),
        ("google/gemma-2-9b", {"attention.sliding_window_pattern": [True]}, "layer_types is not a list"),
        ("google/gemma-2-9b", {"attention.sliding_window": None}, "attention.sliding_window is missing"),
        ("deepseek-ai/DeepSeek-V3", {"rope.dimension_count": 192}, "of which 192 carry the position"),
        ("openai/gpt-oss-20b", {"expert_count": None}, "expert_count is missing"),
    ],
)
def test_what_the_metadata_does_not_say_or_says_wrongly_is_refused(name, changes, message):
    with pytest.raises((UnsupportedModelError, ModelFileError)) as caught:
        shape_from_gguf(header_of(name, **changes), name=name)
    assert message in str(caught.value)


def test_an_architecture_that_is_not_known_is_named():
    header = header_of("google/gemma-2b")
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture is 'mamba'") as caught:
        shape_from_gguf(replace(header, metadata={"general.architecture": "mamba"}), name="x")
    assert "config.json" in caught.value.hints[0]
    without = {name: each for name, each in header.tensors.items() if name != "token_embd.weight"}
    with pytest.raises(ModelFileError, match=r"token_embd\.weight"):
        shape_from_gguf(replace(header, tensors=without), name="x")
