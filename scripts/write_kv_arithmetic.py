"""Write the tables of docs/kv-arithmetic.md from the planner's code.

python scripts/write_kv_arithmetic.py           rewrite the page's tables
python scripts/write_kv_arithmetic.py --check   exit 1 if one is behind
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from octavo.models.catalogue import find_model
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.engine_version import EngineVersion
from octavo.planner.kv_arithmetic import KVLayout, kv_layout
from octavo.planner.weight_arithmetic import rank_weights
from octavo.units import GIB, KIB, MIB

PAGE = Path(__file__).parents[1] / "docs" / "kv-arithmetic.md"
NAMES = {
    "Llama 3 8B": "meta-llama/Meta-Llama-3-8B",
    "Llama 3 70B": "meta-llama/Meta-Llama-3-70B",
    "GPT-3 175B": "gpt3-175b-shape",
}
V1 = EngineVersion(0, 19)


def shape_of(name: str) -> ModelShape:
    """Read a model of the catalogue."""
    model = find_model(name)
    return shape_from_hf(model.config, where=model.name, name=model.name)


def size(num_bytes: float) -> str:
    """Print bytes in the largest binary unit that leaves at most two decimals: `320 KiB`, `1.25 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{num_bytes:,.0f} B"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Print a table whose first column is words and whose others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def corrected() -> str:
    """Tokens and requests of the three models of the introductory text."""
    printed = {"Llama 3 8B": "256 KB", "Llama 3 70B": "640 KB", "GPT-3 175B": "3.2 MB"}
    rows = []
    for name, model in NAMES.items():
        token = kv_layout(shape_of(model), engine="vllm").token_bytes
        rows.append((name, printed[name], size(token), *(f"{each * token / GIB:g} GiB" for each in (4096, 32768))))
    token = kv_layout(shape_of(NAMES["Llama 3 70B"]), engine="vllm").token_bytes
    rows.append(("32 requests x 32,768 tokens, 70B", "640 GB", "", "", size(32 * 32768 * token)))
    return table(("model", "printed, per token", "per token", "4,096 tokens", "32,768 tokens"), rows)


def levers() -> str:
    """What heads and dtypes do to one layer's cost of a token."""
    rows = []
    shapes = (
        ("Llama 2 7B", "llama-2-7b"),
        ("Llama 3 8B", "llama-3-8b"),
        ("Falcon 7B", "falcon-7b"),
        ("DeepSeek V3", "deepseek-v3"),
    )
    for name, model in shapes:
        shape = shape_of(model)
        layer = next(each.kv for each in shape.layers if each.kv)
        kept = f"{layer.num_kv_heads} x {layer.key_dim}" + (" once" if layer.kind == "latent" else " twice")
        costs = [kv_layout(shape, engine="octavo", kv_dtype=dtype).token_bytes for dtype in ("f16", "int8", "int4")]
        rows.append((name, f"{len(shape.layers)}", kept, *map(size, costs)))
    return table(("model", "layers", "kept in a layer", "f16", "int8", "int4"), rows)


def ranks() -> str:
    """Bytes of a token on one of several devices."""
    rows = []
    for name, model in (
        ("Llama 3 70B", "llama-3-70b"),
        ("Qwen3 30B-A3B", "qwen3-30b-a3b"),
        ("DeepSeek V3", "deepseek-v3"),
    ):
        shape = shape_of(model)
        costs = [
            kv_layout(shape, engine="vllm", version=V1, tensor_parallel_size=number).token_bytes
            for number in (1, 2, 4, 8, 16)
        ]
        rows.append((name, *map(size, costs)))
    return table(("model", "1 rank", "2", "4", "8", "16"), rows)


def groups() -> str:
    """Groups, blocks and concurrency of models with unlike layers, as vLLM 0.19 lays them out."""
    rows = []
    logged = (
        ("Gemma 2 27B", "gemma-2-27b", 1, 58_672),
        ("Gemma 3 27B", "gemma-3-27b", 1, 36_560),
        ("Gemma 3 4B", "gemma-3-4b", 1, 468_144),
        ("gpt-oss 20B, 2 ranks", "gpt-oss-20b", 2, 2_591_776),
    )
    for name, model, num_ranks, tokens in logged:
        layout = kv_layout(shape_of(model), engine="vllm", version=V1, tensor_parallel_size=num_ranks)
        blocks = tokens // layout.block_size * len(layout.groups)
        rows.append(
            (
                name,
                _kinds(layout),
                f"{len(layout.groups)}",
                size(layout.block_bytes),
                f"{layout.blocks_for(8192):,}",
                f"{tokens:,}",
                f"{layout.concurrency(blocks, 8192):.2f}",
            )
        )
    head = ("model", "layers by kind", "groups", "a block", "blocks of a request of 8,192", "logged tokens", "requests")
    return table(head, rows)


def _kinds(layout: KVLayout) -> str:
    counts: dict[str, int] = {}
    for group in layout.groups:
        counts[group.kind] = counts.get(group.kind, 0) + group.num_layers
    return " + ".join(f"{count} {kind}" for kind, count in counts.items())


def states() -> str:
    """Blocks of hybrids with a state per request, as vLLM lays them out."""
    rows = []
    cases = (
        ("Qwen3.5 35B-A3B, fp8", "qwen3.5-35b-a3b", "fp8", 1, EngineVersion(0, 17), 65_536),
        ("Qwen3.8 27B, fp8, 2 ranks", "qwen3.8-27b", "fp8", 2, EngineVersion(0, 25), 131_072),
        ("Qwen3-Next 80B", "qwen3-next-80b-a3b", "auto", 1, EngineVersion(0, 25), 65_536),
        ("Kimi Linear 48B, 2 ranks", "kimi-linear-48b-a3b", "auto", 2, EngineVersion(0, 11), 120_000),
    )
    for name, model, dtype, num_ranks, version, length in cases:
        layout = kv_layout(
            shape_of(model), engine="vllm", version=version, kv_dtype=dtype, tensor_parallel_size=num_ranks
        )
        attention = next(group for group in layout.groups if group.kind != "state")
        state = next(group for group in layout.groups if group.kind == "state")
        rows.append(
            (
                name,
                f"{attention.token_bytes // attention.num_layers:,} B",
                f"{state.state_bytes // state.num_layers:,} B",
                f"{layout.block_size:,}",
                f"{len(layout.groups)}",
                f"{layout.blocks_for(length):,} of {length:,} tokens",
            )
        )
    head = ("model", "a token in a layer", "a state in a layer", "tokens a block", "groups", "blocks of a request")
    return table(head, rows)


def weights() -> str:
    """Parameters, and bytes of one device by how weights are stored."""
    rows = []
    for name, model in (
        ("Llama 3 8B", "llama-3-8b"),
        ("Llama 3 70B", "llama-3-70b"),
        ("Mixtral 8x7B", "mixtral-8x7b"),
        ("DeepSeek V3", "deepseek-v3"),
    ):
        shape = shape_of(model)
        costs = [
            rank_weights(shape, weight_dtype=dtype, tensor_parallel_size=number).num_bytes
            for dtype, number in (("bf16", 1), ("fp8", 1), ("awq", 1), ("q4_k", 1), ("bf16", 8))
        ]
        counts = f"{shape.num_parameters:,}", f"{shape.num_active_parameters:,}"
        rows.append((name, *counts, *(f"{cost / GIB:.2f}" for cost in costs)))
    return table(
        ("model", "parameters", "of them active", "bf16, GiB", "fp8", "awq", "q4_k", "bf16, 1 of 8 ranks"), rows
    )


TABLES: dict[str, Callable[[], str]] = {
    "corrected": corrected,
    "levers": levers,
    "ranks": ranks,
    "groups": groups,
    "states": states,
    "weights": weights,
}


def insert(text: str) -> str:
    """Return the page with every table between its marks written anew."""
    for name, write in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"the page has a place for the table {name}"
        text = f"{before}{begin}{write()}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
