"""Which products of a model are timed, and as what."""

from __future__ import annotations

import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.config.engine import EngineConfig
from octavo.errors import InvalidParameterError
from octavo.llm.kernel_bench import product_shapes, run_kernels
from octavo.models.load import open_model
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel, write_hf_model

MODEL = TinyModel(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, vocab_size=512)


def shapes(path, weight_dtype="stored"):
    return [
        (each.name, each.kind, each.num_outputs, each.num_inputs)
        for each in product_shapes(open_model(path), weight_dtype)
    ]


def test_products_are_the_ops_of_one_layer_and_the_head(tmp_path):
    assert shapes(write_hf_model(MODEL, tmp_path / "model")) == [
        ("q, k, v", "f32", 128, 64),
        ("o", "f32", 64, 64),
        ("gate, up", "f32", 256, 64),
        ("down", "f32", 64, 128),
        ("head", "f32", 512, 64),
    ]


def test_kinds_are_those_that_the_model_would_be_held_in(tmp_path):
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf", kind="q4_1", embed_kind="q8_0")

    assert [kind for _, kind, _, _ in shapes(path)] == ["q4_1"] * 4 + ["q8_0"]
    assert {kind for _, kind, _, _ in shapes(path, "f16")} == {"f16"}


def test_reference_runner_has_nothing_to_time(tmp_path):
    folder = write_hf_model(MODEL, tmp_path / "model")

    with pytest.raises(InvalidParameterError, match="--runner"):
        run_kernels(EngineConfig(model=str(folder), runner="reference"))
