"""`octavo bench kernels`: time each kernel against the machine's limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import Output, engine_options, output_options
from octavo.config.sources import AskedConfig

if TYPE_CHECKING:
    from octavo.llm.kernel_bench import KernelBench
    from octavo.runtime.kernel_speed import KernelSpeed

SCHEMA = "octavo.bench.kernels/1"
_HEAD = (
    f"{'kernel':<20}{'kind':<6}{'rows':>4}{'context':>8}{'time':>13}{'GFLOP/s':>9}{'limit':>6}{'GB/s':>8}{'limit':>6}"
)


@click.command(
    "kernels",
    cls=OctavoCommand,
    examples=(
        "octavo bench kernels",
        "octavo bench kernels --threads 1 --weight-dtype f32",
        "octavo bench kernels ./model.gguf --json",
    ),
)
@engine_options
@output_options
def command(asked: AskedConfig, output: Output) -> None:
    """Time each kernel against the machine's limits.

    The limits are measured in the same run and with as many threads: a float32 matrix product in NumPy, and reading
    512 MiB of memory. Kernels run at the shapes of MODEL, on random weights of the kinds it would be held in. Integer
    products may exceed the first limit, and what a cache holds the second. Needs about 0.6 GiB.
    """
    if not output.is_quiet:
        click.echo(f"bench kernels: {asked.config.model}; the machine's limits first", err=True)
    from octavo.cli.render import count_bar, progress_bars
    from octavo.llm.kernel_bench import run_kernels

    with progress_bars(output) as progress, count_bar(output, "measurements") as on_progress:
        bench = run_kernels(asked.config, progress=progress, on_progress=on_progress)
    document = bench_document(bench)
    click.echo(json.dumps(document) if output.is_json else _text(document))


def bench_document(bench: KernelBench) -> dict[str, Any]:
    """Return the JSON document of a run."""
    return {
        "schema": SCHEMA,
        "config": bench.config.as_dict(),
        "instruction_set": bench.kernels_name,
        "threads": bench.config.threads,
        "limits": {
            "matrix_product_gflop_per_s": bench.limits.sgemm_flops / 1e9,
            "memory_read_gb_per_s": bench.limits.read_bytes_per_s / 1e9,
        },
        "kernels": [_kernel_document(speed, bench) for speed in bench.speeds],
    }


def _kernel_document(speed: KernelSpeed, bench: KernelBench) -> dict[str, Any]:
    flop_per_s = None if speed.flop is None else speed.flop / speed.wall_s
    bytes_per_s = speed.num_bytes / speed.wall_s
    return {
        "kernel": speed.kernel,
        "kind": speed.kind,
        "num_rows": speed.num_rows,
        "context_tokens": speed.context_tokens,
        "wall_s": speed.wall_s,
        "gflop_per_s": None if flop_per_s is None else flop_per_s / 1e9,
        "matrix_product_limit_ratio": None if flop_per_s is None else flop_per_s / bench.limits.sgemm_flops,
        "gb_per_s": bytes_per_s / 1e9,
        "memory_read_limit_ratio": bytes_per_s / bench.limits.read_bytes_per_s,
    }


def _text(document: dict[str, Any]) -> str:
    limits = document["limits"]
    product, read = limits["matrix_product_gflop_per_s"], limits["memory_read_gb_per_s"]
    lines = [
        f"{document['config']['model']}, {document['threads']} threads, {document['instruction_set']} kernels",
        f"limits: float32 matrix product {product:,.1f} GFLOP/s, memory read {read:,.1f} GB/s",
        "",
        _HEAD,
    ]
    lines += [_line(kernel) for kernel in document["kernels"]]
    return "\n".join(lines)


def _line(kernel: dict[str, Any]) -> str:
    context = "" if kernel["context_tokens"] is None else f"{kernel['context_tokens']:,}"
    speed = ratio = ""
    if kernel["gflop_per_s"] is not None:
        speed, ratio = f"{kernel['gflop_per_s']:,.1f}", f"{kernel['matrix_product_limit_ratio']:.0%}"
    return (
        f"{kernel['kernel']:<20}{kernel['kind']:<6}{kernel['num_rows']:>4}{context:>8}"
        f"{kernel['wall_s'] * 1e6:>10,.1f} us{speed:>9}{ratio:>6}"
        f"{kernel['gb_per_s']:>8,.1f}{kernel['memory_read_limit_ratio']:>6.0%}"
    )
