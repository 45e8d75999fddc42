"""Weights of one device: schemes by hand, ranks and stages, and what servers logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import InvalidParameterError, ModelFileError, UnsupportedModelError
from octavo.models.catalogue import find_model
from octavo.models.packing import named_packing
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.weight_arithmetic import rank_weights
from octavo.units import GIB

LLAMA = "llama-3.1-8b"
# In one layer of Llama 3.1 8B: q and o, k and v, gate, up and down.
LINEAR_ELEMENTS = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14_336 * 4096)
OTHER_ELEMENTS = 2 * 128_256 * 4096 + 65 * 4096
LINEAR_ROWS = 32 * (2 * 4096 + 2 * 1024 + 2 * 14_336 + 4096)


def shape_of(name: str, **quantization) -> ModelShape:
    config = dict(find_model(name).config)
    if quantization:
        config["quantization_config"] = quantization
    return shape_from_hf(config, where=name, name=name)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        ("auto", 2 * (LINEAR_ELEMENTS + OTHER_ELEMENTS)),
        ("f32", 4 * (LINEAR_ELEMENTS + OTHER_ELEMENTS)),
        ("awq", LINEAR_ELEMENTS // 2 + LINEAR_ELEMENTS // 128 * 5 // 2 + 2 * OTHER_ELEMENTS),
        ("gptq", LINEAR_ELEMENTS // 2 + LINEAR_ELEMENTS // 128 * 5 // 2 + 2 * OTHER_ELEMENTS),
        ("w4a16", LINEAR_ELEMENTS // 2 + LINEAR_ELEMENTS // 128 * 2 + 2 * OTHER_ELEMENTS),
        ("int4", LINEAR_ELEMENTS // 2 + LINEAR_ELEMENTS // 128 * 2 + 2 * OTHER_ELEMENTS),
        ("w8a8", LINEAR_ELEMENTS + 2 * LINEAR_ROWS + 2 * OTHER_ELEMENTS),
        ("fp8", LINEAR_ELEMENTS + 4 * LINEAR_ROWS + 2 * OTHER_ELEMENTS),
        ("fp8-block", LINEAR_ELEMENTS + 4 * LINEAR_ELEMENTS // 128**2 + 2 * OTHER_ELEMENTS),
        ("nvfp4", LINEAR_ELEMENTS // 2 + LINEAR_ELEMENTS // 16 + 2 * OTHER_ELEMENTS),
        ("q8_0", (LINEAR_ELEMENTS + 2 * 128_256 * 4096) // 32 * 34 + 2 * 65 * 4096),
        ("q4_k", (LINEAR_ELEMENTS + 2 * 128_256 * 4096) // 256 * 144 + 2 * 65 * 4096),
    ],
)
def test_scheme_packs_linear_layers_and_leaves_the_rest(dtype, num_bytes):
    assert rank_weights(shape_of(LLAMA), weight_dtype=dtype).num_bytes == num_bytes


def test_mxfp4_packs_experts_alone():
    """gpt-oss 20B: 24 x 32 experts of 3 x 2880 x 2880 in 4 1/4 bits, all else in bfloat16; padded to tiles in vLLM."""
    shape = shape_of("gpt-oss-20b")
    experts, others = 24 * 32 * 3 * 2880 * 2880, 0
    others = sum(each.num_elements for each in shape.tensors if not (each.role == "expert" and each.is_linear))

    plain, padded = (rank_weights(shape, is_padded=is_padded) for is_padded in (False, True))

    assert plain.num_bytes == experts // 2 + experts // 32 + 2 * others
    assert plain.stored_as == "mxfp4, else bfloat16"
    grown = 24 * 32 * 3 * 2944 * 3072
    assert padded.num_bytes - (grown // 2 + grown // 32) == 2 * others


@pytest.mark.parametrize(
    ("config", "same_as"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}}
                },
                "ignore": ["lm_head"],
            },
            "w8a8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}
                },
            },
            "w4a16",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-nf4"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
                    }
                },
            },
            "fp8-block",
        ),
    ],
)
def test_scheme_of_a_config_is_the_scheme_of_that_name(config, same_as):
    quantised = shape_of(LLAMA, **config)

    assert quantised.quantization == config["quant_method"]
    assert rank_weights(quantised).num_bytes == rank_weights(shape_of(LLAMA), weight_dtype=same_as).num_bytes


def test_scale_of_a_whole_tensor_is_one():
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    shape = shape_of(LLAMA, quant_method="compressed-tensors", config_groups={"group_0": {"weights": weights}})

    assert rank_weights(shape).num_bytes == LINEAR_ELEMENTS + 2 * 32 * 7 + 2 * OTHER_ELEMENTS


def test_group_of_a_config_decides_the_number_of_scales():
    narrow = shape_of(LLAMA, quant_method="gptq", bits=4, group_size=32)
    whole = shape_of(LLAMA, quant_method="gptq", bits=4, group_size=-1)

    assert rank_weights(narrow).num_bytes == (
        LINEAR_ELEMENTS // 2 + LINEAR_ELEMENTS // 32 * 5 // 2 + 2 * OTHER_ELEMENTS
    )
    assert rank_weights(whole).num_bytes == LINEAR_ELEMENTS // 2 + LINEAR_ROWS * 5 // 2 + 2 * OTHER_ELEMENTS


def test_layers_that_a_config_leaves_out_stay_wide():
    attention = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)
    patterned = shape_of(LLAMA, quant_method="fp8", modules_to_not_convert=["lm_head", "re:.*self_attn.*"])
    listed = shape_of(
        LLAMA,
        quant_method="fp8",
        ignored_layers=[f"model.layers.{layer}.self_attn.q_proj" for layer in range(32)],
    )
    once = shape_of(LLAMA, quant_method="fp8", ignored_layers=["model.layers.0.self_attn.q_proj"])

    whole = rank_weights(shape_of(LLAMA), weight_dtype="fp8").num_bytes
    rows = 32 * (2 * 4096 + 2 * 1024)
    assert rank_weights(patterned).num_bytes == rank_weights(listed).num_bytes == whole + attention - 4 * rows
    assert rank_weights(once).num_bytes == whole


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"quant_method": "hqq"}, UnsupportedModelError),
        ({"quant_method": "compressed-tensors"}, UnsupportedModelError),
        ({"bits": 4}, ModelFileError),
        ({"quant_method": "awq", "bits": "four"}, ModelFileError),
    ],
)
def test_scheme_whose_bytes_are_unknown_is_refused(config, error):
    with pytest.raises(error):
        shape_of(LLAMA, **config)


def test_scheme_that_nobody_knows_is_refused_by_name():
    with pytest.raises(InvalidParameterError, match="is not a scheme"):
        named_packing("int3")


def test_ranks_divide_matrices_and_hold_norms_whole():
    shape = shape_of(LLAMA)
    norms = 65 * 4096

    for ranks in (2, 4, 8):
        expected = (LINEAR_ELEMENTS + 2 * 128_256 * 4096) // ranks + norms
        assert rank_weights(shape, tensor_parallel_size=ranks).num_bytes == 2 * expected


def test_more_ranks_than_kv_heads_hold_copies_of_keys_and_values():
    shape = shape_of(LLAMA)
    keys_values = 32 * 2 * 1024 * 4096

    expected = (LINEAR_ELEMENTS - keys_values + 2 * 128_256 * 4096) // 16 + keys_values // 8 + 65 * 4096
    assert rank_weights(shape, tensor_parallel_size=16).num_bytes == 2 * expected


def test_latent_projections_are_whole_on_every_rank():
    shape = shape_of("deepseek-v2-lite")
    whole = {each.name for each in shape.tensors if each.num_shards == 1 and each.role == "attention"}

    assert whole == {"layers.*.kv_a_proj.weight"}


def test_stages_share_layers_and_the_first_and_last_hold_the_tables():
    shape = shape_of(LLAMA)
    layer = LINEAR_ELEMENTS // 32 + 2 * 4096

    most = rank_weights(shape, pipeline_parallel_size=4).num_bytes

    assert most == 2 * (8 * layer + 128_256 * 4096 + 4096)  # the last has the head and the final norm


def test_tied_table_is_in_the_first_and_in_the_last_stage():
    shape = shape_of("gemma-7b")

    halves = rank_weights(shape, pipeline_parallel_size=2).num_bytes

    assert halves == 2 * ((shape.num_parameters - 256_000 * 3072 - 3072) // 2 + 256_000 * 3072 + 3072)


def test_learned_positions_are_in_the_first_stage():
    shape = shape_of("gpt2")
    layer, tables, last_norm = 7_087_872, (50_257 + 1024) * 768, 2 * 768

    first_and_last = 6 * layer + tables, 6 * layer + 50_257 * 768 + last_norm

    assert rank_weights(shape, weight_dtype="f16", pipeline_parallel_size=2).num_bytes == 2 * max(first_and_last)
    assert shape.num_parameters == 12 * layer + tables + last_norm


PLAIN = [
    row
    for row in map(
        json.loads,
        (Path(__file__).parents[1] / "data" / "kv_logs" / "logs.jsonl").read_text().splitlines(),
    )
    if row["kind"] == "controlled"
]
SCHEMES = {"fp8": "fp8", "w8a8": "w8a8", "w4a16": "w4a16"}
# Engines hold more than these models' text tensors.
WITH_MORE = ("gemma-3", "vision", "Mistral-Small-3.1", "DeepSeek-V2", "gpt-oss")


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row["id"]) for row in PLAIN if not any(name in row["model_id"] for name in WITH_MORE)]
)
def test_weights_are_what_servers_logged(row):
    """Within 0.5 % (1.5 % where 4 bits make small tables weigh more); servers round, pad, and hold position tables."""
    scheme = next((SCHEMES[part] for part in SCHEMES if part in row["model_id"]), "auto")
    name = row["model_id"].removeprefix("RedHatAI/").removesuffix("-dynamic").removesuffix("-fp8")
    name = name.removesuffix(".w8a8").removesuffix(".w4a16").removesuffix("-quantized").removeprefix("Meta-")

    ours = rank_weights(shape_of(name), weight_dtype=scheme, tensor_parallel_size=row["tp"], is_padded=True)

    logged = row["weights_gib_per_gpu"]
    assert -0.1 * logged / 100 - 0.005 <= logged - ours.num_bytes / GIB <= 0.005 * logged + 0.1


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in PLAIN if "gpt-oss" in row["model_id"]])
def test_experts_in_mxfp4_are_padded_as_servers_logged(row):
    ours = rank_weights(shape_of(row["model_id"]), tensor_parallel_size=row["tp"], is_padded=True)

    assert ours.num_bytes / GIB == pytest.approx(row["weights_gib_per_gpu"], rel=0.03)
