"""The tables behind `octavo plan --list-models` and `--list-devices`."""

from __future__ import annotations

import json
from typing import Any

import click

from octavo.errors import ModelError
from octavo.models.aliases import ALIASES
from octavo.models.catalogue import find_model, list_models
from octavo.models.shape_config import shape_from_hf
from octavo.planner.devices import list_devices
from octavo.planner.kv_arithmetic import kv_layout
from octavo.units import GIB, format_bytes


def print_models(*, is_json: bool) -> None:
    """Write every model that can be planned for without a file."""
    rows = [_model_row(name) for name in list_models()]
    if is_json:
        click.echo(json.dumps({"schema": "octavo.models/1", "aliases": sorted(ALIASES), "models": rows}))
        return
    width = max(len(row["name"]) for row in rows)
    click.echo(f"{'model':<{width}}  {'parameters':>10}  {'context':>9}  {'KV a token':>10}  layers")
    for row in rows:
        click.echo(
            f"{row['name']:<{width}}  {row['parameters'] / 1e9:>8,.2f} B  {row['max_position']:>9,}"
            f"  {_bytes(row['kv_bytes_per_token']):>10}  {row['layers']}"
        )
    click.echo(f"\naliases: {', '.join(sorted(ALIASES))}; KV in 16 bits, all layers, while no window is full")


def _model_row(name: str) -> dict[str, Any]:
    model = find_model(name)
    shape = shape_from_hf(model.config, where=name, name=name)
    kinds: dict[str, int] = {}
    token_bytes: int | None
    for layer in shape.layers:
        kind = "recurrent" if layer.state is not None else layer.kv.kind if layer.kv is not None else "no cache"
        kinds[kind] = kinds.get(kind, 0) + 1
    try:
        token_bytes = kv_layout(shape, engine="vllm", kv_dtype="bf16").token_bytes
    except ModelError:
        token_bytes = None  # no engine's layout of it is known
    return {
        "name": name,
        "parameters": shape.num_parameters,
        "max_position": shape.max_position,
        "kv_bytes_per_token": token_bytes,
        "layers": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "source": model.source,
    }


def _bytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def print_devices(*, is_json: bool) -> None:
    """Write every device whose memory and speed are known."""
    devices = list_devices()
    if is_json:
        rows = [
            {
                "id": each.id,
                "name": each.name,
                "kind": each.kind,
                "memory_bytes": each.memory_bytes,
                "visible_bytes": each.visible_bytes,
                "bandwidth_bytes_per_s": each.bandwidth_bytes_per_s,
                "fp16_flop_per_s": each.fp16_flop_per_s,
                "fp8_flop_per_s": each.fp8_flop_per_s,
                "provenance": each.provenance,
                "source": each.source,
            }
            for each in devices
        ]
        click.echo(json.dumps({"schema": "octavo.devices/1", "devices": rows}))
        return
    width = max(len(each.id) for each in devices)
    click.echo(f"{'device':<{width}}  {'memory':>9}  {'seen':>9}  {'bandwidth':>10}  {'fp16':>8}  name")
    for each in devices:
        flops = f"{each.fp16_flop_per_s / 1e12:,.0f} T" if each.fp16_flop_per_s else "-"
        click.echo(
            f"{each.id:<{width}}  {each.memory_bytes / GIB:>5,.0f} GiB  {each.visible_bytes / GIB:>5,.1f} GiB"
            f"  {each.bandwidth_bytes_per_s / 1e9:>5,.0f} GB/s  {flops:>8}  {each.name}"
        )
    click.echo("\nseen: what an engine sees of the memory; fp16: dense FLOP/s")
