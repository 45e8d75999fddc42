"""Names of tensors in three spellings, and the shapes a model needs."""

from __future__ import annotations

from math import prod

import pytest

from octavo.models.config import spec_from_hf
from octavo.models.names import canonical_names, count_parameters, gguf_name, hf_name, tensor_shapes
from octavo.testing.tiny_gguf import gguf_name as gguf_name_of_hf
from octavo.testing.tiny_models import TinyModel, make_config
from octavo.testing.tiny_models import tensor_shapes as written_shapes

MODELS = {
    "llama": TinyModel(),
    "tied": TinyModel(tie_embeddings=True),
    "biases": TinyModel(attention_bias=True, mlp_bias=True, num_layers=11),
    "qwen2": TinyModel(architecture="qwen2", num_kv_heads=4),
    "qwen3": TinyModel(architecture="qwen3", head_dim=32, attention_bias=True),
    "odd widths": TinyModel(num_heads=3, num_kv_heads=1, hidden_size=48, head_dim=10, intermediate_size=50),
}


def spec_of(model):
    return spec_from_hf(make_config(model), where="config.json", name="tiny")


@pytest.mark.parametrize(
    ("name", "hf", "gguf"),
    [
        ("embed", "model.embed_tokens.weight", "token_embd.weight"),
        ("layers.7.q", "model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight"),
        ("layers.7.q_bias", "model.layers.7.self_attn.q_proj.bias", "blk.7.attn_q.bias"),
        ("layers.0.k_norm", "model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
        ("layers.10.mlp_norm", "model.layers.10.post_attention_layernorm.weight", "blk.10.ffn_norm.weight"),
        ("layers.10.down_bias", "model.layers.10.mlp.down_proj.bias", "blk.10.ffn_down.bias"),
        ("final_norm", "model.norm.weight", "output_norm.weight"),
        ("lm_head", "lm_head.weight", "output.weight"),
    ],
)
def test_name_is_spelled_as_each_format_spells_it(name, hf, gguf):
    assert (hf_name(name), gguf_name(name)) == (hf, gguf)


@pytest.mark.parametrize("name", MODELS)
def test_model_needs_exactly_the_tensors_that_files_of_it_hold(name):
    spec, written = spec_of(MODELS[name]), written_shapes(MODELS[name])
    needed = tensor_shapes(spec)

    assert {hf: needed[ours] for hf, ours in canonical_names(spec, hf_name).items()} == written
    assert set(canonical_names(spec, gguf_name)) == {gguf_name_of_hf(hf) for hf in written}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_the_shapes_add_up(name):
    spec = spec_of(MODELS[name])

    assert spec.num_parameters == count_parameters(spec) == sum(map(prod, tensor_shapes(spec).values()))
