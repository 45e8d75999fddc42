"""Shapes of published models: exact numbers of parameters, and what a token leaves in each layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.models.catalogue import find_model
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "published_shapes" / "published.json").read_text()
)

# Published totals that count something else than the text model that serving loads.
OTHER_TOTALS = {
    "Qwen/Qwen3-VL-2B-Instruct": "with the vision tower, whose sizes the configuration here does not give",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "with the vision tower",
    "google/gemma-3-4b-it": "with the vision tower",
    "google/gemma-3-12b-it": "with the vision tower",
    "google/gemma-3-27b-it": "with the vision tower",
    "deepseek-ai/DeepSeek-V3": "with the layer that predicts further tokens and with scales, as stored",
    "deepseek-ai/DeepSeek-R1": "with the layer that predicts further tokens and with scales, as stored",
    "moonshotai/Kimi-K2-Instruct": "with the scales of its 8-bit weights, as stored",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "with the layer that predicts further tokens",
    "tiiuae/falcon-7b": "with the tied head counted a second time",
}
# What serving loads of some of them is known as well, and of others in the catalogue, from cards and files.
LOADED_TOTALS = {
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "deepseek-ai/DeepSeek-R1": 671_026_419_200,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_232_448,
    "tiiuae/falcon-7b": 7_217_189_760 - 65_024 * 4_544,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "bigcode/starcoder": 15_517_456_384,
    "deepseek-ai/DeepSeek-Coder-V2-Instruct": 235_741_434_880,
    "google/gemma-2b": 2_506_172_416,
    "ibm-granite/granite-3.1-2b-instruct": 2_533_531_648,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
}
# Layers of unlike sizes, or entries for several tokens: there is no one published figure.
WITHOUT_ONE_RATE = ("deepseek-ai/DeepSeek-V4-Flash", "google/gemma-4-26B-A4B", "XiaomiMiMo/MiMo-V2-Flash")


def shape_of(name: str) -> ModelShape:
    return shape_from_hf(find_model(name).config, where=name, name=name)


@pytest.mark.parametrize(
    "name", [name for name, facts in PUBLISHED.items() if facts["total_params"] and name not in OTHER_TOTALS]
)
def test_number_of_parameters_is_the_published_one_to_the_last(name):
    assert shape_of(name).num_parameters == PUBLISHED[name]["total_params"]


@pytest.mark.parametrize("name", LOADED_TOTALS)
def test_number_of_parameters_that_serving_loads_is_exact(name):
    assert shape_of(name).num_parameters == LOADED_TOTALS[name]


@pytest.mark.parametrize("name", OTHER_TOTALS)
def test_published_total_is_another_only_by_what_it_counts_besides(name):
    shape = shape_of(name)

    missing = PUBLISHED[name]["total_params"] - shape.num_parameters

    assert 0 < missing < 0.25 * PUBLISHED[name]["total_params"]
    assert ("vision tower" in OTHER_TOTALS[name]) == bool(shape.uncounted)


def test_plain_models_are_all_counted_to_the_last():
    by_arithmetic = {
        name
        for name, facts in PUBLISHED.items()
        if str(facts["total_params_provenance"]).startswith("shape arithmetic")
    }

    assert len(by_arithmetic) >= 45
    assert not by_arithmetic & OTHER_TOTALS.keys()


@pytest.mark.parametrize("name", [name for name, facts in PUBLISHED.items() if facts["active_params"]])
def test_active_parameters_are_the_published_ones_as_they_are_rounded(name):
    """Cards round to whole billions, some without embeddings (`A3B`), some with."""
    shape = shape_of(name)
    tables = sum(tensor.num_elements for tensor in shape.tensors if tensor.role in ("embedding", "head"))

    published, active = PUBLISHED[name]["active_params"], shape.num_active_parameters

    assert active - tables - 0.05 * published - 0.5e9 <= published <= active + 0.05 * published + 0.5e9


@pytest.mark.parametrize("name", [name for name, facts in PUBLISHED.items() if facts["kv_bytes_per_token_bf16"]])
def test_kv_bytes_per_token_are_the_published_ones(name):
    kept = [layer.kv for layer in shape_of(name).layers if layer.kv is not None]

    assert sum(2 * kv.num_elements for kv in kept) == PUBLISHED[name]["kv_bytes_per_token_bf16"]


@pytest.mark.parametrize("name", WITHOUT_ONE_RATE)
def test_layers_of_models_without_one_rate_differ(name):
    kept = {layer.kv for layer in shape_of(name).layers if layer.kv is not None}

    assert PUBLISHED[name]["kv_bytes_per_token_bf16"] is None
    assert len({kv.num_elements / kv.tokens_per_entry for kv in kept}) > 1 or len({kv.kind for kv in kept}) > 1


def test_windows_chunks_latents_and_states_are_where_each_family_has_them():
    def kinds(name: str) -> dict[tuple[str, int | None], int]:
        counts: dict[tuple[str, int | None], int] = {}
        for layer in shape_of(name).layers:
            key = (
                (layer.kv.kind, layer.kv.window)
                if layer.kv is not None
                else ("state", None)
                if layer.state is not None
                else ("nothing", None)
            )
            counts[key] = counts.get(key, 0) + 1
        return counts

    full, state = ("full", None), ("state", None)
    assert kinds("meta-llama/Meta-Llama-3-70B") == {full: 80}
    assert kinds("mistralai/Mistral-7B-v0.1") == {("sliding", 4096): 32}
    assert kinds("Qwen/Qwen2.5-7B-Instruct") == {full: 28}  # its window fields are switched off
    assert kinds("google/gemma-3-27b-it") == {("sliding", 1024): 52, full: 10}
    assert kinds("openai/gpt-oss-120b") == {("sliding", 128): 18, full: 18}
    assert kinds("meta-llama/Llama-4-Scout-17B-16E-Instruct") == {("chunked", 8192): 36, full: 12}
    assert kinds("deepseek-ai/DeepSeek-V3") == {("latent", None): 61}
    assert kinds("Qwen/Qwen3-Next-80B-A3B-Instruct") == {state: 36, full: 12}
    assert kinds("moonshotai/Kimi-Linear-48B-A3B-Instruct") == {state: 20, ("latent", None): 7}
    assert kinds("nvidia/Nemotron-H-56B-Base-8K") == {state: 54, ("nothing", None): 54, full: 10}
    assert kinds("ai21labs/Jamba-v0.1") == {state: 28, full: 4}


def test_layers_of_a_model_may_keep_heads_of_unlike_sizes():
    gemma, mimo = shape_of("google/gemma-4-26B-A4B"), shape_of("XiaomiMiMo/MiMo-V2-Flash")

    gemma_heads = {(kv.kind, kv.num_kv_heads, kv.key_dim, kv.value_dim) for layer in gemma.layers if (kv := layer.kv)}
    mimo_heads = {(kv.kind, kv.num_kv_heads, kv.key_dim, kv.value_dim) for layer in mimo.layers if (kv := layer.kv)}

    assert gemma_heads == {("sliding", 8, 256, 256), ("full", 2, 512, 512)}
    assert mimo_heads == {("sliding", 8, 192, 128), ("full", 4, 192, 128)}


def test_indexer_keeps_a_key_in_eight_bits_beside_the_latent_vector():
    kept = {(kv.key_dim, kv.index_bytes) for layer in shape_of("zai-org/GLM-5").layers if (kv := layer.kv)}

    assert kept == {(512 + 64, 128 + 4)}
