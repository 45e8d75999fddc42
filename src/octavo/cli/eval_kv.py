"""`octavo eval kv`: what a smaller KV cache costs, and what it gains."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, output_options, table_options
from octavo.config.engine import OPTIONS, KVDtype, find_option
from octavo.config.sources import AskedConfig, ask, environment_source
from octavo.config.text_file import read_text_file
from octavo.errors import InvalidParameterError, MachineError
from octavo.units import MIB, parse_count

if TYPE_CHECKING:
    from octavo.llm.kv_eval import KVEvaluation, Variant
    from octavo.runtime.divergence import DivergenceSummary

SCHEMA = "octavo.eval.kv/1"

MAX_TEXT_BYTES = 16 * MIB
_ENGINE_OPTIONS = tuple(
    replace(option, auto="f32") if option.name == "weight_dtype" else option
    for option in OPTIONS
    if option.name in ("model", "weight_dtype", "threads")
)
"""Those that have a meaning without an engine around them."""


def _read_dtypes(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[KVDtype, ...]:
    option = find_option("kv_cache_dtype")
    assert option is not None
    words = [word.strip() for word in text.split(",") if word.strip()]
    dtypes = tuple(dict.fromkeys(option.read(word, param="--kv-cache-dtype") for word in words))
    if not dtypes or "auto" in dtypes:
        raise InvalidParameterError(
            f"{text!r} is not a list of dtypes", param="--kv-cache-dtype", hints=("`--kv-cache-dtype f16,int8`",)
        )
    return dtypes


def _read_counts(_ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    assert parameter.name is not None
    name = "attention_window" if parameter.name == "windows" else parameter.name
    option = find_option(name)
    assert option is not None
    words = [word.strip() for word in text.split(",") if word.strip()]
    return tuple(dict.fromkeys(option.read(word, param=f"--{option.flag_name}") for word in words))


def _read_tokens(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    return None if text is None else parse_count(text, param="--max-tokens")


def _read_budget(_ctx: click.Context, _parameter: click.Parameter, budget: float | None) -> float | None:
    if budget is not None and not math.isfinite(budget):
        raise InvalidParameterError(
            f"{budget} is no number of nats", param="--budget-kl", hints=("`--budget-kl 0.01`",)
        )
    return budget


@click.command(
    "kv",
    cls=OctavoCommand,
    examples=(
        "octavo eval kv --kv-cache-dtype int8,int4 --max-tokens 2k",
        "octavo eval kv --budget-kl 0.01 --report kv.html",
    ),
)
@table_options(_ENGINE_OPTIONS, lambda flags: {"asked": ask(flags, environment_source(os.environ))})
@click.option("--kv-cache-dtype", "dtypes", cls=GroupedOption, group="Variants", metavar="LIST",
              default="f16,int8,fp8_e4m3,int4", show_default=True, callback=_read_dtypes,
              help="Ways to hold keys and values, compared with f32 on the same weights")  # fmt: skip
@click.option("--attention-window", "windows", cls=GroupedOption, group="Variants", metavar="LIST",
              default="", callback=_read_counts,
              help="Besides, each dtype with windows of so many tokens and 4 sinks")  # fmt: skip
@click.option("--sparse-blocks", "sparse_blocks", cls=GroupedOption, group="Variants", metavar="LIST",
              default="", callback=_read_counts,
              help="Besides, each dtype reading so many tiles of 16 tokens a query")  # fmt: skip
@click.option("--text", "text_path", cls=GroupedOption, group="Text", metavar="FILE", type=Path,
              help="What is read; a novel of Jane Austen comes along")  # fmt: skip
@click.option("--max-tokens", cls=GroupedOption, group="Text", metavar="N", callback=_read_tokens,
              help="Tokens read; by default as many as the model's limit and the text allow")  # fmt: skip
@click.option("--passkeys/--no-passkeys", "has_passkeys", cls=GroupedOption, group="Text", default=True,
              show_default=True, help="Hide numbers in long texts and ask for them")  # fmt: skip
@click.option("--budget-kl", cls=GroupedOption, group="Variants", metavar="NATS", type=click.FloatRange(min=0),
              callback=_read_budget,
              help="Recommend the smallest variant whose mean KL divergence is at most this")  # fmt: skip
@click.option("--report", "report_path", cls=GroupedOption, group="Output", metavar="FILE", type=Path,
              help="Write table and charts as one .html file")  # fmt: skip
@output_options
def command(
    asked: AskedConfig,
    dtypes: tuple[KVDtype, ...],
    windows: tuple[int, ...],
    sparse_blocks: tuple[int, ...],
    text_path: Path | None,
    max_tokens: int | None,
    has_passkeys: bool,
    budget_kl: float | None,
    report_path: Path | None,
    output: Output,
) -> None:
    """What a smaller KV cache costs, and what it gains.

    One long text is read with float32 keys and values and with each variant, on the same weights, and the whole
    distributions after every token are compared: at its end, where most is cached, errors have had most time to add up.

    Weights are held in f32 unless --weight-dtype says otherwise. Beside integer weights activations are rounded to 8
    bits, where the slightest difference tips some of them over: any two caches then differ by about the same.
    """
    _check_report_path(report_path)
    from octavo.cli.eval_kv_view import print_variants
    from octavo.cli.render import count_bar, progress_bars
    from octavo.llm.kv_eval import KVEvaluator, Way, bundled_text, recommend

    config = asked.config
    if asked.origins["weight_dtype"] == "default":
        config = replace(config, weight_dtype="f32")
    if text_path is None:
        text = bundled_text()
    else:
        text = read_text_file(text_path, param="--text", what="a text", max_bytes=MAX_TEXT_BYTES)
    ways = [Way(kv_cache_dtype=dtype) for dtype in dtypes]
    ways += [Way(kv_cache_dtype=dtype, attention_window=each) for dtype in dtypes for each in windows]
    ways += [Way(kv_cache_dtype=dtype, sparse_blocks=each) for dtype in dtypes for each in sparse_blocks]
    with progress_bars(output) as progress:
        evaluator = KVEvaluator(config, text, max_tokens=max_tokens, ways=ways, progress=progress)
    with count_bar(output, "tokens") as on_progress:
        evaluation = evaluator.evaluate(ways, has_passkeys=has_passkeys, on_progress=on_progress)
    best = None if budget_kl is None else recommend(evaluation, budget_kl)
    document = _document(evaluation, budget_kl=budget_kl, best=best)
    if report_path is not None:
        _write_report(report_path, document)
    if output.is_json:
        click.echo(json.dumps(document, allow_nan=False))
    else:
        print_variants(document)
    if report_path is not None and not output.is_quiet:
        click.echo(f"wrote {report_path}", err=True)


def _check_report_path(path: Path | None) -> None:
    """Refuse now what could not be written after minutes of reading."""
    if path is None:
        return
    if path.suffix.lower() != ".html":
        raise InvalidParameterError(f"{path} does not end in .html", param="--report", hints=("`--report kv.html`",))
    if not path.absolute().parent.is_dir():
        raise MachineError(f"{path}: cannot be written", because=f"there is no folder {path.parent}")
    if path.is_dir():
        raise MachineError(f"{path}: cannot be written", because="it is a folder")


def _document(evaluation: KVEvaluation, *, budget_kl: float | None, best: Variant | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": evaluation.model,
        "threads": evaluation.threads,
        "num_positions": evaluation.num_positions,
        "compared_with": "f32",
        "exact_passkeys": [asdict(each) for each in evaluation.exact_passkeys],
        "variants": [_variant(each) for each in evaluation.variants],
        "budget_kl": budget_kl,
        "recommended": None if best is None else best.way.label,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    return {
        "label": variant.way.label,
        "kv_cache_dtype": variant.way.kv_cache_dtype,
        "attention_window": variant.way.attention_window,
        "sparse_blocks": variant.way.sparse_blocks,
        "bytes_per_token": variant.bytes_per_token,
        **_summary(variant.whole),
        "buckets": [
            {"first_position": each.first_position, "last_position": each.last_position, **_summary(each.summary)}
            for each in variant.buckets
        ],
        "passkeys": [asdict(each) for each in variant.passkeys],
        "decode_tokens_per_s": variant.decode_tokens_per_s,
    }


def _summary(summary: DivergenceSummary) -> dict[str, Any]:
    return {
        "kl_mean": _finite(summary.kl_mean),
        "kl_p99": _finite(summary.kl_p99),
        "top1_agreement_ratio": summary.top1_agreement_ratio,
        "perplexity": _finite(summary.perplexity),
        "perplexity_ratio": _finite(summary.perplexity / summary.exact_perplexity),
    }


def _finite(value: float) -> float | None:
    """Return a number, or nothing for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _write_report(path: Path, document: dict[str, Any]) -> None:
    from octavo.cli.eval_kv_report import html_report

    try:
        path.write_text(html_report(document), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{path}: cannot be written", because=str(error.strerror)) from error
