"""The layout of the KV pool against what servers logged: every collected start-up log is a case.

Rows that cannot be reproduced from what they state are in `UNLIKE`, each with its reason.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import UnsupportedModelError
from octavo.models.catalogue import find_model
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.engine_version import EngineVersion
from octavo.planner.kv_arithmetic import KVLayout, kv_layout
from octavo.units import GIB

Row = dict[str, Any]

ROWS: tuple[Row, ...] = tuple(
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "kv_logs" / "logs.jsonl").read_text().splitlines()
)

# Names in logs that are no catalogue names: copies, quantised or tuned, of the same shape, or a user's words for it.
_SAME_SHAPE = {
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
    "mistralai/Mistral-7B": "mistralai/Mistral-7B-v0.1",
    "chinese-llama-alpaca-2 (Llama-2-7B)": "meta-llama/Llama-2-7b-hf",
    "DeepSeek-R1 (4-bit, moe_wna16)": "deepseek-ai/DeepSeek-R1",
    "meta-llama/Llama-3.1-8B (default of the example script)": "meta-llama/Llama-3.1-8B",
    "Qwen2.5-32B FP8": "Qwen/Qwen2.5-32B-Instruct",
    "Qwen3-30B-A3B FP8": "Qwen/Qwen3-30B-A3B",
    "DeepSeek-V2-Lite (swift)": "deepseek-ai/DeepSeek-V2-Lite",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "Qwen3.8-27B (4-bit)": "Qwen/Qwen3.8-27B",
    "Qwen/Qwen3.8-27B-FP8": "Qwen/Qwen3.8-27B",
    "Qwen3.6-27B-AutoRound int4": "Qwen/Qwen3.6-27B",
    "Kimi-Linear-48B-A3B-Instruct AWQ": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "DeepSeek-V4-Flash-0731": "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-ai/DeepSeek-V3.2",
    "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8": "meta-llama/Llama-3.1-405B",
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "meta-llama/Llama-3.3-70B-Instruct",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "Llama-3-8B (14.9595 GB)": "meta-llama/Meta-Llama-3-8B",
    "Meta-Llama-3.1-70B-Instruct-AWQ-INT4": "meta-llama/Llama-3.1-70B",
    "DeepSeek-R1/V3 (671B FP8)": "deepseek-ai/DeepSeek-V3",
    "Qwen/Qwen3-30B-A3B (bf16, 56.88 GiB)": "Qwen/Qwen3-30B-A3B",
    "GLM-5 (FP8)": "zai-org/GLM-5",
    "Qwen3-Next-80B-A3B W4A16": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen3.5/3.6-35B-A3B shape": "Qwen/Qwen3.5-35B-A3B",
    "Qwen2.5-32B shape (Qwen2ForCausalLM)": "Qwen/Qwen2.5-32B-Instruct",
    "RedHatAI/Qwen2.5-7B-Instruct-fp8-dynamic": "Qwen/Qwen2.5-7B-Instruct",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": "meta-llama/Llama-3.1-8B",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": "meta-llama/Llama-3.1-8B",
    "RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8": "Qwen/Qwen2.5-7B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-ai/DeepSeek-V2-Lite",
}
# Releases of rows that state only a date, or nothing.
_RELEASES = {
    "2023-12": EngineVersion(0, 2),
    "2023-06": EngineVersion(0, 1),
    "2024-04 (V0)": EngineVersion(0, 4),
    "2024-08 (V0)": EngineVersion(0, 5),
    "2025-07": EngineVersion(0, 10),
    "2026-08": EngineVersion(0, 25),
    "2026-09": EngineVersion(0, 26),
    "2026": EngineVersion(0, 25),
    "0.2x (2026)": EngineVersion(0, 20),
    "V1": EngineVersion(0, 10),
}
_UNSTATED = EngineVersion(0, 19)
_NUMBER = re.compile(r"\d+\.\d+(?:\.\d+)?")


@cache
def shape_of(model_id: str) -> ModelShape:
    """Return the shape of the model that a row names."""
    model = find_model(_SAME_SHAPE.get(model_id, model_id))
    return shape_from_hf(model.config, where=model.name, name=model.name)


def version_of(row: Row) -> EngineVersion:
    """Return the release of a row."""
    text = row.get("engine_version", "")
    if text in _RELEASES:
        return _RELEASES[text]
    found = _NUMBER.search(text)
    return EngineVersion(*map(int, found.group().split("."))) if found else _UNSTATED


def layout_of(row: Row, **changes: Any) -> KVLayout:
    """Return the layout of the pool that a row is about."""
    dtype = str(row.get("kv_cache_dtype", "auto")).split(" ")[0]
    asked: dict[str, Any] = {
        "engine": "sglang" if row["engine"].startswith("sglang") else "vllm",
        "version": version_of(row),
        "kv_dtype": dtype,
        "block_size": row.get("block_size"),
        "tensor_parallel_size": row.get("tp", 1),
        "pipeline_parallel_size": row.get("pp", 1),
        "max_num_batched_tokens": row.get("max_num_batched_tokens", 8192),
    }
    return kv_layout(shape_of(row["model_id"]), **(asked | changes))


UNLIKE = {
    "kv004": "the GiB are one worker's, the tokens the least of four: 178,880 x 48,128 B = 8.018 GiB of the 8.11",
    "kv034": "started with a draft layer and speculative tokens, which the row does not state; both enlarge the states",
    "kv042": "entries that stand for several tokens: the thread itself shows 4 to 93 KiB a token for one checkpoint",
    "kv048": "a release that forgot the indexer's keys: it logs 61 x 656 B where it allocates 61 x 788 B",
    "kv051": "no pool at all: the weights alone exceed the share",
    "kv093": "entries that stand for several tokens",
    "kv094": "entries that stand for several tokens",
    "kv100": "a hybrid whose configuration is not published",
    "kv101": "a hybrid whose configuration is not published",
    "kv103": "an unreleased branch with draft layers, whose number the row does not state",
}
# What a row's own page says of its start, beside the fields of the row.
SAID_BESIDE = {
    "kv020": {"block_size": 256},  # on a TPU: 22 blocks are the 5,632 tokens that it suggests
    "kv054": {"decode_context_parallel_size": 8},
}
# The row states 65,536; only a start at twice that gives its tokens, which since 0.21 depend on it.
REAL_LENGTHS = {"kv091": 131_072}

ROUNDING_GIB = 0.005  # logs print two decimals
BYTES_TOLERANCE = 0.003
CONCURRENCY_TOLERANCE = 0.005

DERIVABLE = [row for row in ROWS if row["id"] not in UNLIKE]


def length_of(row: Row) -> int | None:
    return REAL_LENGTHS.get(row["id"], row.get("max_model_len"))


def layout_as_logged(row: Row) -> KVLayout:
    return layout_of(row, **SAID_BESIDE.get(row["id"], {}))


def cases(*fields: str) -> list[Any]:
    return [
        pytest.param(row, id=f"{row['id']}-{row['model_id']}")
        for row in DERIVABLE
        if all(row.get(field) is not None for field in fields)
    ]


def test_every_row_is_a_case_or_states_nothing_to_compare():
    checked = {
        case.values[0]["id"]
        for fields in (
            ("implied_bytes_per_token",),
            ("max_concurrency", "kv_tokens", "max_model_len"),
            ("num_gpu_blocks", "kv_tokens"),
            ("estimated_max_model_len", "available_kv_gib"),
        )
        for case in cases(*fields)
    }
    rest = [row for row in ROWS if row["id"] not in checked | UNLIKE.keys()]

    # Without both a size in bytes and a size in tokens or blocks there is no rate in a row.
    in_bytes = ("available_kv_gib", "needed_kv_gib", "sglang_k_gb")
    in_tokens = ("kv_tokens", "num_gpu_blocks", "num_cpu_blocks")
    assert all(not any(f in row for f in in_bytes) or not any(f in row for f in in_tokens) for row in rest)
    assert len(ROWS) == 126
    assert len(checked) >= 95


@pytest.mark.parametrize("row", cases("implied_bytes_per_token"))
def test_bytes_per_token_are_what_was_logged(row):
    layout, implied_from = layout_as_logged(row), row["implied_from"]

    if implied_from.startswith("available"):
        ours = layout.logged_token_bytes(length_of(row))
    elif implied_from.startswith("needed"):
        ours = layout.request_token_bytes(row["max_model_len"])
    else:  # a swap space of 4 GiB holds so many blocks, or keys and values are printed on their own
        ours = float(layout.token_bytes)

    if row["id"] == "kv038":  # 318 blocks, of which each of four groups has 79: the quotient is of 316
        assert layout.logged_tokens(318) == row["kv_tokens"]
        assert layout.num_blocks(int((row["available_kv_gib"] - 0.003) * GIB)) == 318
    else:
        assert ours == pytest.approx(row["implied_bytes_per_token"], rel=BYTES_TOLERANCE)


@pytest.mark.parametrize("row", cases("max_concurrency", "kv_tokens", "max_model_len"))
def test_concurrency_is_what_was_logged(row):
    layout = layout_as_logged(row)
    if layout.is_counted_by_concurrency:
        num_blocks = layout.num_blocks(int(row["available_kv_gib"] * GIB))
    else:
        num_blocks = row["kv_tokens"] // layout.block_size * len(layout.groups)

    ours = layout.concurrency(num_blocks, row["max_model_len"])

    rounding = 0.005 + CONCURRENCY_TOLERANCE * row["max_concurrency"]
    assert ours == pytest.approx(row["max_concurrency"], abs=rounding)


@pytest.mark.parametrize("row", cases("num_gpu_blocks", "kv_tokens"))
def test_logged_blocks_and_tokens_differ_by_the_block_size(row):
    layout = layout_as_logged(row)

    # Runs of 2026 print blocks per group.
    assert layout.logged_tokens(row["num_gpu_blocks"] * len(layout.groups)) == row["kv_tokens"]


@pytest.mark.parametrize("row", cases("available_kv_gib", "kv_tokens"))
def test_pool_in_bytes_gives_the_logged_tokens(row):
    layout = layout_as_logged(row)

    low, high = (
        layout.logged_tokens(layout.num_blocks(int((row["available_kv_gib"] + side) * GIB)), length_of(row))
        for side in (-ROUNDING_GIB, ROUNDING_GIB)
    )

    slack = 0.003 * row["kv_tokens"]  # workers differ a little, and the log shows the bytes of one of them
    assert low - slack <= row["kv_tokens"] <= high + slack


@pytest.mark.parametrize("row", cases("estimated_max_model_len", "available_kv_gib"))
def test_longest_length_is_what_the_server_suggested(row):
    layout = layout_as_logged(row)

    low, high = (
        layout.longest(layout.num_blocks(int((row["available_kv_gib"] + side) * GIB)), row["max_model_len"])
        for side in (-ROUNDING_GIB, ROUNDING_GIB)
    )

    # vLLM searches in single tokens, so its answer is the last of a block; some releases give the block before.
    assert low - 2 * layout.block_size <= row["estimated_max_model_len"] <= high + layout.block_size


def test_block_of_a_hybrid_grows_until_a_state_fits():
    logged = {row["id"]: row["block_size"] for row in ROWS if row["id"] in ("kv035", "kv096")}

    grown = {name: layout_of(row, block_size=16).block_size for row in ROWS if (name := row["id"]) in logged}

    assert grown == logged == {"kv035": 1568, "kv096": 2096}


def test_excluded_rows_are_off_for_the_reason_that_is_given():
    rows = {row["id"]: row for row in ROWS}

    least_worker_gib = rows["kv004"]["kv_tokens"] * layout_of(rows["kv004"]).token_bytes / GIB
    forgotten = sum(layer.kv.index_bytes for layer in shape_of(rows["kv048"]["model_id"]).layers)

    assert least_worker_gib == pytest.approx(8.018, abs=0.001)
    assert layout_of(rows["kv048"]).token_bytes - forgotten == pytest.approx(
        rows["kv048"]["implied_bytes_per_token"], rel=BYTES_TOLERANCE
    )
    for name in ("kv042", "kv093", "kv094"):
        with pytest.raises(UnsupportedModelError):
            layout_of(rows[name])
    assert set(UNLIKE) <= set(rows)
