"""`octavo bench offline`: run a workload as fast as the engine can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, engine_options, output_options
from octavo.cli.process_age import process_age_s
from octavo.config.sources import AskedConfig

if TYPE_CHECKING:
    from octavo.engine.metrics import Spread
    from octavo.llm.offline import LLM
    from octavo.llm.offline_bench import OfflineBench


@click.command(
    "offline",
    cls=OctavoCommand,
    examples=(
        "octavo bench offline --workload workload.json",
        "octavo bench offline --workload workload.json --kv-cache-memory 64MiB --max-model-len 1024 --json",
        "octavo bench offline --workload workload.json --kv-allocator reserved",
    ),
)
@engine_options
@click.option("--workload", "path", cls=GroupedOption, group="Prompt", required=True, metavar="FILE", type=Path,
              help='JSON list of {"prompt_token_ids": [...], "max_tokens": n}')  # fmt: skip
@output_options
def command(asked: AskedConfig, path: Path, output: Output) -> None:
    """Run a workload as fast as the engine can.

    All requests are sent at once, greedily, each with exactly its `max_tokens` output tokens (an `arrival_s` is not
    waited for).
    """
    from octavo.cli.render import count_bar, print_card, progress_bars
    from octavo.llm.offline import LLM
    from octavo.llm.offline_bench import peak_rss_bytes, read_workload, run_offline

    workload = read_workload(path)
    with progress_bars(output) as progress:
        llm = LLM(asked.config, progress=progress)
    startup_s = process_age_s()
    if not output.is_quiet and not output.is_json:
        print_card(llm.card)
    with count_bar(output, "output tokens") as on_progress:
        bench = run_offline(llm, workload, on_progress)
    document = bench_document(llm, bench, startup_s=startup_s, peak_rss_bytes=peak_rss_bytes())
    if output.is_json:
        click.echo(json.dumps(document))
    else:
        click.echo(_text(document))


def bench_document(llm: LLM, bench: OfflineBench, *, startup_s: float, peak_rss_bytes: int) -> dict[str, Any]:
    """Return the JSON document of a run."""
    metrics = bench.metrics
    return {
        "schema": "octavo.bench.offline/1",
        "config": llm.config_document(),
        "num_requests": bench.num_requests,
        "prompt_tokens": metrics.num_prompt_tokens,
        "output_tokens": metrics.num_output_tokens,
        "wall_s": bench.wall_s,
        "output_tokens_per_s": bench.output_tokens_per_s,
        "total_tokens_per_s": bench.total_tokens_per_s,
        "startup_s": startup_s,
        "runner_s": bench.runner_s,
        "num_steps": metrics.num_steps,
        "hit_tokens": metrics.num_hit_tokens,
        "copied_blocks": metrics.num_copies,
        "preemptions": metrics.num_preemptions,
        "recomputed_tokens": metrics.num_recomputed_tokens,
        "peak_kv_usage_ratio": metrics.peak_kv_usage_ratio,
        "kv_token_utilization_ratio": metrics.kv_token_utilization_ratio,
        "max_running": metrics.max_running,
        "mean_running": metrics.mean_running,
        "peak_rss_bytes": peak_rss_bytes,
        "ttft_s": _spread(bench.ttft_s),
        "itl_s": _spread(bench.itl_s),
        "e2e_s": _spread(bench.e2e_s),
    }


def _spread(values: Spread) -> dict[str, float | None]:
    return values._asdict()


def _text(document: dict[str, Any]) -> str:
    return "\n".join((*map("".join, _sentences(document)), "", *_time_table(document)))


def _sentences(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    outside_ratio = 1 - document["runner_s"] / document["wall_s"]
    yield (
        f"{document['num_requests']:,} requests, {document['prompt_tokens']:,} prompt tokens",
        f" ({document['hit_tokens']:,} from the prefix cache), {document['output_tokens']:,} output tokens",
    )
    yield (
        f"{document['wall_s']:.2f} s: {document['output_tokens_per_s']:,.1f} output tokens/s,",
        f" {document['total_tokens_per_s']:,.1f} tokens/s in all; started in {document['startup_s']:.2f} s",
    )
    yield (
        f"{document['num_steps']:,} steps, {document['mean_running']:.1f} requests running on average",
        f" (at most {document['max_running']}), {outside_ratio:.1%} of the time outside the kernels",
    )
    yield (
        f"KV: {document['peak_kv_usage_ratio']:.0%} of blocks held at the peak,",
        f" {document['kv_token_utilization_ratio']:.0%} of held places filled;",
        f" {document['preemptions']:,} preemptions, {document['recomputed_tokens']:,} tokens recomputed",
    )
    yield (f"peak resident memory {document['peak_rss_bytes'] / 2**20:,.0f} MiB",)


def _time_table(document: dict[str, Any]) -> Iterator[str]:
    yield f"{'seconds':<22}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}"
    for name, label in (("ttft_s", "time to first token"), ("itl_s", "between tokens"), ("e2e_s", "whole request")):
        cells = ("-" if value is None else f"{value:.3f}" for value in document[name].values())
        yield f"{label:<22}" + "".join(f"{cell:>9}" for cell in cells)
