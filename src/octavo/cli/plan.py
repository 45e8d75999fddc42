"""`octavo plan`: how many requests fit, before anything is downloaded or bought."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, output_options, table_options
from octavo.config.sources import Source, environment_source
from octavo.errors import InvalidParameterError, MachineError
from octavo.planner.question import PLAN_OPTIONS, PlanQuestion, question_from

if TYPE_CHECKING:
    from octavo.planner.plan import Plan


def _read(flags: Source) -> dict[str, Any]:
    """Return the question of the flags; Octavo's own variables count where Octavo is planned for."""
    from octavo.planner.sizer import engine_of

    question = question_from(flags)
    if engine_of(question) == "octavo":
        environment = environment_source(os.environ)
        if question.device is not None:
            environment = _without(environment, "memory", "utilization")
        question = question_from(flags, environment)
    return {"question": question}


def _without(source: Source, *names: str) -> Source:
    values = {name: value for name, value in source.values.items() if name not in names}
    return Source(name=source.name, values=values, spellings=source.spellings)


@click.command(
    "plan",
    cls=OctavoCommand,
    examples=(
        "octavo plan smollm2-135m",
        "octavo plan llama-3-70b --device h100-80gb --devices 4 --max-model-len 32k",
        "octavo plan qwen3-8b --memory 24GiB --engine vllm --lengths 1155:211 --itl 50ms",
        "octavo plan llama-3-8b --device l4 --target-concurrency 64 --max-model-len 8k",
        "octavo plan smollm2-135m --memory 1GiB --max-model-len 8k --check",
        "octavo plan --list-models",
    ),
)
@table_options(PLAN_OPTIONS, _read)
@click.option("--calibrate", "log_path", cls=GroupedOption, group="Device", metavar="FILE", type=Path,
              help="A start-up log of vLLM or SGLang that corrects the rules, or what `octavo bench kernels --json` "
              "measured")  # fmt: skip
@click.option("--check", "is_checked", cls=GroupedOption, group="Output", is_flag=True,
              help="Exit with 3 when it does not fit, or does not hold the target, and name what would")  # fmt: skip
@click.option("--report", "report_path", cls=GroupedOption, group="Output", metavar="FILE", type=Path,
              help="Write a page with bars and curves, complete in one file")  # fmt: skip
@click.option("--list-models", "is_listing_models", cls=GroupedOption, group="Output", is_flag=True,
              help="List the models whose sizes come with Octavo")  # fmt: skip
@click.option("--list-devices", "is_listing_devices", cls=GroupedOption, group="Output", is_flag=True,
              help="List the known devices with their memory and speed")  # fmt: skip
@output_options
def command(
    question: PlanQuestion,
    log_path: Path | None,
    is_checked: bool,
    report_path: Path | None,
    is_listing_models: bool,
    is_listing_devices: bool,
    output: Output,
) -> None:
    """Say how many requests fit, before anything is downloaded or bought.

    Counts weights, activations and KV cache from a model's configuration alone: no weights, no device and no network
    are needed. For Octavo itself the answer is what its own start will do, to the byte; for vLLM and SGLang it follows
    dated rules, and says within what interval. Every figure names its source.
    """
    if is_listing_models and is_listing_devices:
        raise InvalidParameterError("given together with --list-devices", param="--list-models", hints=("give one",))
    if is_listing_models or is_listing_devices:
        from octavo.cli.plan_lists import print_devices, print_models

        (print_models if is_listing_models else print_devices)(is_json=output.is_json)
        return
    from octavo.llm.plan import plan_for

    plan = plan_for(question, calibrate_path=log_path)
    if report_path is not None:
        _write_report(plan, report_path)
    if output.is_json:
        click.echo(json.dumps(plan.as_dict()))
    else:
        from octavo.cli.plan_view import print_answer, print_plan

        (print_answer if output.is_quiet else print_plan)(plan)
    if is_checked and not plan.is_as_asked:
        if output.is_json:
            raise click.exceptions.Exit(3)
        plan.check()


def _write_report(plan: Plan, path: Path) -> None:
    from octavo.planner.report import report_page

    try:
        path.write_text(report_page(plan), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from error
