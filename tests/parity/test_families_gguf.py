"""Families in GGUF files: written with the names and sizes of the `gguf` package, read as their folders are read."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import UnsupportedModelError
from octavo.models.gguf_config import spec_from_gguf
from octavo.models.gguf_file import read_gguf_header
from octavo.models.load import open_model
from octavo.testing.dense_model import DenseModel
from octavo.testing.tiny_gguf import GgufKind, encode, pick_kind

ARCHITECTURES = {
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3 window": "phi3",
    "olmo2": "olmo2",
    "mixtral": "llama",
    "qwen3_moe normalised": "qwen3moe",
}
PARTS_OF_NAMES = "architecture", "name"
"""What a GGUF file may say in other words."""


def load_families() -> ModuleType:
    """Import the test file beside this one, which knows how to make the models."""
    spec = importlib.util.spec_from_file_location("families", Path(__file__).with_name("test_families.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, tmp_path_factory):
    """Return a family's name, its folder and its GGUF file."""
    folder = tmp_path_factory.mktemp("families") / "model"
    model = load_families().make_model(request.param)
    if request.param == "gemma2":  # what readers of the format take for granted
        model.config.query_pre_attn_scalar = 16
    model.save_pretrained(folder)
    return request.param, folder, write_gguf(model.config, folder, ARCHITECTURES[request.param])


def write_gguf(config: Any, folder: Path, architecture: str, *, kind: GgufKind = "f32") -> Path:
    """Write the tensors of a folder, matrices as `kind` where the format's own converters do so."""
    path = folder.parent / f"{architecture}-{kind}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    num_layers = config.num_hidden_layers
    add_sizes(writer, config, architecture)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), num_layers
    )
    for name, values in stacked(read_folder(folder)).items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        rows = converted(name, values, config, architecture)
        stays = rows.ndim == 1 or theirs.startswith("position") or "ffn_gate_inp" in theirs
        used = "f32" if stays else pick_kind(rows, kind)
        writer.add_tensor(theirs, encode(rows, used), raw_dtype=gguf.GGMLQuantizationType[used.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_sizes(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture in ("gpt2", "starcoder"):
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_head_count_kv(1 if architecture == "starcoder" else config.num_attention_heads)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("llama", "qwen3moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name: values for name, values in tensors.items() if not name.endswith("lm_head.weight")} | (
        {"lm_head.weight": tensors["lm_head.weight"]} if "lm_head.weight" in tensors else {}
    )


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the tensors of all experts of a layer into one, as the format has them."""
    merged: dict[str, Any] = {}
    for name, values in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found is None:
            merged[name] = values
        else:
            merged.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = values
    return {
        name: np.stack([values[expert] for expert in sorted(values)]) if isinstance(values, dict) else values
        for name, values in merged.items()
    }


def converted(name: str, values: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    if architecture == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return np.ascontiguousarray(values.T)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(num_heads, 2, -1, values.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def test_a_file_gives_the_logits_of_its_folder_to_the_bit(case):
    _, folder, path = case
    token_ids = np.random.default_rng(1).integers(0, 512, 60).tolist()

    assert np.array_equal(DenseModel.load(path).logits(token_ids), DenseModel.load(folder).logits(token_ids))


def test_a_file_gives_the_spec_of_its_folder(case):
    name, folder, path = case
    from_folder, from_file = open_model(folder).spec, open_model(path).spec

    assert from_file.architecture == from_folder.architecture
    assert from_file.kv_groups == from_folder.kv_groups
    assert from_file.num_parameters == from_folder.num_parameters, name
    assert open_model(path).program == open_model(folder).program


@pytest.mark.parametrize("case", ["gemma2"], indirect=True)
def test_caps_that_a_file_leaves_out_are_those_of_the_family(case):
    header = read_gguf_header(case[2])
    fields = {name: value for name, value in header.metadata.items() if not name.endswith("softcapping")}
    assert len(fields) == len(header.metadata) - 2

    spec = spec_from_gguf(replace(header, metadata=fields))

    assert (spec.attention_softcap, spec.logits_softcap) == (50, 30)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("olmo2", "olmo2.attention.sliding_window", 64),
        ("gemma3", "gemma3.attention.sliding_window_pattern", 4),
        ("gemma3", "gemma3.attention.sliding_window_pattern", [True, False] * 3 + [True]),
        ("gemma3", "gemma3.attn_logit_softcapping", 50.0),
    ],
    indirect=["case"],
)
def test_windows_and_caps_that_a_family_has_not_are_refused(case, field, value):
    header = read_gguf_header(case[2])
    with pytest.raises(UnsupportedModelError, match=field.split(".", 1)[1]):
        spec_from_gguf(replace(header, metadata={**header.metadata, field: value}))


@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
def test_a_pattern_of_windows_that_is_the_familys_own_is_read(case):
    header = read_gguf_header(case[2])
    name, whole = "gemma3.attention.sliding_window_pattern", spec_from_gguf(header)
    for value in (6, [True] * 5 + [False, True]):
        assert spec_from_gguf(replace(header, metadata={**header.metadata, name: value})) == whole
