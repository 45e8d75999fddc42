"""Models that the engine runs have the same bytes by either path: config to spec to shape, and config to shape."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import get_args

import pytest

from octavo.config.engine import KVDtype
from octavo.models.config import spec_from_hf
from octavo.models.gguf_config import spec_from_gguf
from octavo.models.gguf_file import read_gguf_header
from octavo.models.safetensors_file import read_safetensors_directory
from octavo.models.shape_config import shape_from_hf
from octavo.models.shape_spec import shape_from_gguf, shape_from_spec
from octavo.planner.kv_arithmetic import kv_layout
from octavo.planner.memory import kv_shape
from octavo.planner.weight_arithmetic import rank_weights
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import LLAMA3_ROPE, TinyModel, make_config, tensor_shapes, write_hf_model

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_models" / "models.json").read_text())
TINY = {
    "llama": TinyModel(),
    "tied, one KV head": TinyModel(num_heads=8, num_kv_heads=1, head_dim=24, tie_embeddings=True, num_layers=3),
    "mistral": TinyModel(architecture="mistral"),
    "qwen2": TinyModel(architecture="qwen2", rope_scaling=LLAMA3_ROPE),
    "qwen3": TinyModel(architecture="qwen3"),
}


def both(config, name):
    spec = spec_from_hf(config, where=name, name=name)
    return spec, shape_from_spec(spec, dtype="float32"), shape_from_hf(config, where=name, name=name)


def by_size(shape):
    """What counts, without the names: role, size, copies, layers, how it is divided and packed."""
    return sorted(
        (each.role, each.rows, each.columns, each.count, each.layers, each.num_shards, each.is_linear)
        for each in shape.tensors
    )


@pytest.mark.parametrize("name", TINY)
def test_tiny_model_has_the_same_tensors_and_layers_by_either_path(name):
    spec, from_spec, from_config = both(make_config(TINY[name]), name)

    stored = sum(prod(shape) for shape in tensor_shapes(TINY[name]).values())

    assert by_size(from_spec) == by_size(from_config)
    assert from_spec.layers == from_config.layers
    assert spec.num_parameters == from_spec.num_parameters == from_config.num_parameters == stored


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_the_same_tensors_and_layers_by_either_path(name):
    _, from_spec, from_config = both(PUBLISHED[name]["config"], name)

    assert by_size(from_spec) == by_size(from_config)
    assert from_spec.layers == from_config.layers
    assert from_spec.num_parameters == PUBLISHED[name]["num_parameters"]


@pytest.mark.parametrize("kv_dtype", get_args(KVDtype))
@pytest.mark.parametrize("name", TINY)
def test_layout_of_a_shape_is_the_pool_that_the_engine_makes(name, kv_dtype):
    config = make_config(TINY[name]) | ({"sliding_window": 48} if name == "mistral" else {})
    spec, _, shape = both(config, name)

    pool = kv_shape(spec, kv_dtype=kv_dtype, block_size=16)
    layout = kv_layout(shape, engine="octavo", kv_dtype=kv_dtype, block_size=16, max_num_batched_tokens=32)

    lengths = [1, 15, 16, 17, 47, 48, 49, 79, 80, 81, 200, 2000]
    assert (layout.block_bytes, layout.token_bytes) == (pool.block_bytes, pool.token_bytes)
    assert [layout.blocks_for(each) for each in lengths] == [
        pool.blocks_for_tokens(each, max_num_batched_tokens=32) for each in lengths
    ]
    assert [layout.longest(each, 2000) for each in range(12)] == [
        pool.longest_tokens(each, max_num_batched_tokens=32, limit=2000) for each in range(12)
    ]
    assert any(group.window for group in layout.groups) == (name == "mistral")


def test_weights_of_a_shape_are_the_bytes_of_its_files(tmp_path):
    folder = write_hf_model(TinyModel(architecture="qwen2"), tmp_path, dtype="bf16")
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()), where="tiny", name="tiny")

    stored = sum(entry.num_bytes for entry in read_safetensors_directory(folder / "model.safetensors").values())

    assert rank_weights(shape).num_bytes == stored


def test_gguf_file_gives_the_shape_of_its_metadata(tmp_path):
    header = read_gguf_header(write_gguf_model(TinyModel(), tmp_path / "tiny.gguf"))

    shape = shape_from_gguf(header)

    assert shape.num_parameters == spec_from_gguf(header).num_parameters
    assert shape.num_parameters == sum(entry.num_values for entry in header.tensors.values())
