"""`octavo bench serve`: put a load on a server and measure what its clients would see."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, output_options
from octavo.errors import InvalidParameterError, MachineError

_TIMES = (
    ("ttft_s", "time to first token"),
    ("itl_s", "between pieces of text"),
    ("tpot_s", "per output token"),
    ("e2e_s", "whole request"),
    ("late_s", "sent later than due"),
)


class Positive(click.FloatRange):
    """A number that is one: NaN lies in every range, as far as click can tell."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is no finite number", param, ctx)


def _option(*spelling: str, group: str, **attributes: Any) -> Callable[[Any], Any]:
    return click.option(*spelling, cls=GroupedOption, group=group, **attributes)


@click.command(
    "serve",
    cls=OctavoCommand,
    examples=(
        "octavo bench serve --base-url http://127.0.0.1:8000/v1 --workload workload.json",
        "octavo bench serve --base-url http://127.0.0.1:8000/v1 --workload workload.json --request-rate 4 --json",
    ),
)
@_option("--base-url", "base_url", group="Server", required=True, metavar="URL",
         help="Where the API is, with its /v1")  # fmt: skip
@_option("--model", group="Server", metavar="NAME", help="Name to ask for  [default: the first of /v1/models]")
@_option("--api-key", "api_key", group="Server", envvar="OCTAVO_API_KEY", metavar="KEY",
         help="Sent as a bearer token  [environment: OCTAVO_API_KEY]")  # fmt: skip
@_option("--tokenizer", group="Server", metavar="MODEL",
         help="Spell prompts with this model's tokenizer for a server that takes no token ids")  # fmt: skip
@_option("--workload", "path", group="Load", required=True, metavar="FILE", type=Path,
         help='JSON list of {"prompt_token_ids": [...], "max_tokens": n, "arrival_s": s}')  # fmt: skip
@_option("--request-rate", group="Load", type=Positive(min=0, min_open=True), metavar="R",
         help="Poisson arrivals, R a second on average  [default: each arrival_s, else at once]")  # fmt: skip
@_option("--seed", group="Load", type=int, default=0, metavar="N", help="Of the arrivals  [0]")
@_option("--max-concurrency", group="Load", type=click.IntRange(min=1), metavar="N",
         help="Most requests in flight  [default: no limit]")  # fmt: skip
@_option("--timeout", "timeout_s", group="Load", type=Positive(min=0, min_open=True), default=600.0,
         metavar="S", help="Longest that one request may take  [600 s]")  # fmt: skip
@output_options
def command(
    base_url: str,
    model: str | None,
    api_key: str | None,
    tokenizer: str | None,
    path: Path,
    request_rate: float | None,
    seed: int,
    max_concurrency: int | None,
    timeout_s: float,
    output: Output,
) -> None:
    """Put a load on a server and measure what its clients would see.

    Works with any OpenAI-compatible server. Requests are sent when they are due, whether or not earlier ones are done
    (an open loop), greedily, with their length forced where the server knows `ignore_eos`. Prompts go as token ids;
    a server that refuses them gets text, if `--tokenizer` says how they are spelled. Exits with 1 if no answer came.
    """
    from octavo.cli.render import count_bar
    from octavo.llm.http_stream import parse_url
    from octavo.llm.offline_bench import read_workload
    from octavo.llm.serve_bench import bench_document
    from octavo.llm.serve_load import Target, arrivals, list_models, probe, run_load

    workload = read_workload(path)
    endpoint = parse_url(base_url)
    spell = None if tokenizer is None else _speller(tokenizer)
    due_s = arrivals(workload, request_rate=request_rate, seed=seed)

    async def measure() -> dict[str, Any]:
        asked = Target(endpoint=endpoint, model=model or "", api_key=api_key)
        try:
            async with asyncio.timeout(timeout_s):
                names = await list_models(asked)
                named = Target(endpoint=endpoint, model=_choose(model, names), api_key=api_key)
                target = await probe(named, workload, spell)
        except TimeoutError as error:
            raise MachineError(f"{endpoint.host_header} does not answer within {timeout_s:g} s") from error
        with count_bar(output, "requests") as on_progress:
            outcomes = await run_load(
                target,
                workload,
                due_s,
                max_concurrency=max_concurrency,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )
        return bench_document(target, workload, outcomes, request_rate=request_rate, max_concurrency=max_concurrency)

    document = asyncio.run(measure())
    click.echo(json.dumps(document) if output.is_json else _text(document))
    if document["num_whole"] == 0:
        raise click.exceptions.Exit(1)


def _choose(model: str | None, names: list[str]) -> str:
    if model is None and not names:
        raise InvalidParameterError("the server names no model", param="--model", hints=("give one with `--model`",))
    return names[0] if model is None else model


def _speller(model: str) -> Callable[[Sequence[int]], str]:
    """Return a function that turns ids into text with a model's tokenizer; fetches the model if it is not here."""
    from octavo.models.fetch import fetch
    from octavo.models.load import open_model
    from octavo.runtime.load_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_model(fetch(model).path))
    return lambda token_ids: tokenizer.decode(list(token_ids))


def _text(document: dict[str, Any]) -> str:
    lines = list(map("".join, _sentences(document)))
    lines += ["", f"{'seconds':<26}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}"]
    for name, label in _TIMES:
        cells = ("-" if value is None else f"{value:.3f}" for value in document[name].values())
        lines.append(f"{label:<26}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _sentences(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    errors = ", ".join(f"{count:,} {kind}" for kind, count in document["errors"].items()) or "none"
    yield (
        f"{document['num_whole']:,} of {document['num_requests']:,} requests answered by {document['model']}",
        f" at {document['base_url']}; errors: {errors}",
    )
    yield (
        f"{document['prompt_tokens']:,} prompt tokens ({document['cached_tokens']:,} cached),",
        f" {document['output_tokens']:,} output tokens in {document['wall_s']:.2f} s",
    )
    yield (
        f"{document['requests_per_s']:.2f} requests/s, {document['output_tokens_per_s']:,.1f} output tokens/s,",
        f" {document['total_tokens_per_s']:,.1f} tokens/s in all; at most {document['max_in_flight']} in flight",
    )
    if document["num_short"]:
        yield (f"{document['num_short']:,} answers are shorter than asked: compare with care",)
