"""`octavo bench recompute`: time a token with the KV cache and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, engine_options, output_options
from octavo.config.sources import AskedConfig
from octavo.errors import InvalidParameterError, MachineError
from octavo.units import parse_count

if TYPE_CHECKING:
    from octavo.llm.offline import LLM
    from octavo.llm.recompute_bench import RecomputePoint

SCHEMA = "octavo.bench.recompute/1"
REPORT_SUFFIXES = (".svg", ".html")


def _read_lengths(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    lengths = sorted({parse_count(word, param="--lengths") for word in words})
    if not lengths or lengths[0] < 1:
        raise InvalidParameterError(
            f"{text!r} is not a list of lengths", param="--lengths", hints=("`--lengths 128,512,2k`",)
        )
    return tuple(lengths)


def _check_report(_ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in REPORT_SUFFIXES:
        raise InvalidParameterError(
            f"{path} ends in none of {', '.join(REPORT_SUFFIXES)}", param="--report", hints=("`--report cost.html`",)
        )
    return path


@click.command(
    "recompute",
    cls=OctavoCommand,
    examples=(
        "octavo bench recompute",
        "octavo bench recompute --lengths 128,512,2k --repeats 5 --json",
        "octavo bench recompute --report recompute.html",
    ),
)
@engine_options
@click.option("--lengths", cls=GroupedOption, group="Prompt", metavar="LIST", default="128,256,512,1024,2048,4096",
              callback=_read_lengths, show_default=True, help="Tokens before the one that is timed")  # fmt: skip
@click.option("--repeats", "num_repeats", cls=GroupedOption, group="Prompt", type=int, default=3, show_default=True,
              help="Tokens recomputed per length, of which the median counts")  # fmt: skip
@click.option("--report", "report_path", cls=GroupedOption, group="Output", metavar="FILE", type=Path,
              callback=_check_report, help="Write the chart as .svg, or chart and table as .html")  # fmt: skip
@output_options
def command(
    asked: AskedConfig, lengths: tuple[int, ...], num_repeats: int, report_path: Path | None, output: Output
) -> None:
    """Time a token with the KV cache and without.

    Without one, every token costs a pass over the whole prefix: time per token grows with the length, and the time for
    a whole answer with its square. Both ways run on the same kernels, one request at a time, with the prefix cache
    off, and must choose the same tokens.
    """
    if not output.is_quiet:
        click.echo(f"bench recompute: {asked.config.model}, one token after {_words(lengths)} tokens", err=True)
    from octavo.cli.recompute_view import print_points
    from octavo.cli.render import count_bar, progress_bars
    from octavo.llm.offline import LLM
    from octavo.llm.recompute_bench import run_recompute

    config = replace(asked.config, enable_prefix_caching=False, max_num_seqs=asked.config.max_num_seqs or 1)
    with progress_bars(output) as progress:
        llm = LLM(config, progress=progress)
    with count_bar(output, "tokens") as on_progress:
        points = run_recompute(llm, lengths, num_repeats=num_repeats, on_progress=on_progress)
    document = _document(llm, points)
    if report_path is not None:
        _write_report(report_path, document)
    if output.is_json:
        click.echo(json.dumps(document))
    else:
        print_points(document)
    if report_path is not None and not output.is_quiet:
        click.echo(f"wrote {report_path}", err=True)


def _document(llm: LLM, points: list[RecomputePoint]) -> dict[str, Any]:
    from octavo.llm.recompute_bench import DECODED_TOKENS, total_s

    totals = zip(total_s(points, is_cached=True), total_s(points, is_cached=False), strict=True)
    return {
        "schema": SCHEMA,
        "config": llm.config_document(),
        "decoded_tokens": DECODED_TOKENS,
        "points": [
            {
                "context_tokens": point.context_tokens,
                "num_repeats": point.num_repeats,
                "cached_s_per_token": point.cached_s,
                "recomputed_s_per_token": point.recomputed_s,
                "recomputed_to_cached_ratio": point.ratio,
                "cached_total_estimate_s": cached_s,
                "recomputed_total_estimate_s": recomputed_s,
                "are_tokens_equal": point.are_tokens_equal,
            }
            for point, (cached_s, recomputed_s) in zip(points, totals, strict=True)
        ],
    }


def _write_report(path: Path, document: dict[str, Any]) -> None:
    from octavo.cli.recompute_report import html_report, svg_chart

    text = svg_chart(document) if path.suffix.lower() == ".svg" else html_report(document)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path}: cannot be written", because=str(error.strerror)) from error


def _words(lengths: tuple[int, ...]) -> str:
    words = [f"{each:,}" for each in lengths]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
