"""`octavo doctor`: the machine, its limits, and what would be chosen and why. Changes nothing, fetches nothing."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, engine_options, output_options
from octavo.config.engine import OPTIONS
from octavo.config.machine import Machine, read_machine
from octavo.config.sources import AskedConfig, foreign_variables
from octavo.errors import CapacityError, MachineError, OctavoError
from octavo.units import format_bytes
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.planner.card import Card

SCHEMA = "octavo.doctor/1"


@click.command(
    "doctor",
    cls=OctavoCommand,
    examples=(
        "octavo doctor",
        "octavo doctor --json",
        "octavo doctor --config",
        "octavo doctor --selftest",
        "octavo doctor smollm2-135m --memory 2GiB --max-model-len 4k",
    ),
)
@engine_options
@click.option(
    "--config",
    "is_config",
    cls=GroupedOption,
    group="Output",
    is_flag=True,
    help="Print each option's value and where it came from, and nothing else",
)
@click.option(
    "--selftest",
    "is_selftest",
    cls=GroupedOption,
    group="Output",
    is_flag=True,
    help="Compare every kernel with the reference on this machine, and nothing else",
)
@output_options
def command(asked: AskedConfig, is_config: bool, is_selftest: bool, output: Output) -> None:
    """Show the machine, its limits, and what would be chosen and why.

    Memory and CPUs are what this process may use: affinity, cgroup limits (v1 and v2) and quotas are counted. For a
    model that is on this disk, the start card shows where the memory would go. Takes every engine option, to answer
    "what if". Exits with 3 when it would not fit.
    """
    if is_selftest:
        _run_selftest(output)
        return
    machine = read_machine()
    card, refusal = (None, None) if is_config else _plan(asked, machine)
    if output.is_json:
        click.echo(json.dumps(_document(asked, machine, card, refusal)))
    elif is_config:
        _print_config(asked)
    else:
        _print_report(asked, machine, card)
    if refusal is not None:
        raise refusal if not output.is_json else click.exceptions.Exit(refusal.exit_code)


def _run_selftest(output: Output) -> None:
    """Print a line per check as it is done; exit with 1 if one failed.

    Raises:
        MachineError: there are no kernels to test.
    """
    native = _native_facts()
    if not native["is_available"]:
        raise MachineError("there are no native kernels to test", because=native["because"])
    from octavo.runtime.selftest import run_checks

    checks = []
    for check in run_checks():
        checks.append(check)
        if not output.is_json:
            click.echo(f"{'ok  ' if check.is_passed else 'FAIL'}  {check.name}" + f"  {check.detail}".rstrip())
    num_failed = sum(not check.is_passed for check in checks)
    if output.is_json:
        documents = [{"name": c.name, "is_passed": c.is_passed, "detail": c.detail} for c in checks]
        click.echo(json.dumps({"schema": "octavo.selftest/1", "num_failed": num_failed, "checks": documents}))
    else:
        click.echo(f"{len(checks) - num_failed} of {len(checks)} checks passed, kernels: {native['kernels']}")
    if num_failed:
        raise click.exceptions.Exit(1)


def _plan(asked: AskedConfig, machine: Machine) -> tuple[Card | None, CapacityError | None]:
    """Return the start card of the model, or why there is none."""
    from octavo.llm.assemble import model_facts
    from octavo.models.load import open_model
    from octavo.models.local_models import local_path
    from octavo.planner.card import make_card
    from octavo.planner.resolve import resolve

    try:
        path = local_path(asked.config.model, os.environ)
    except MachineError:
        path = None  # there is no cache folder; the report says why
    if path is None:
        return None, None
    model = open_model(path)
    try:
        resolved = resolve(asked.config, machine, model_facts(model, asked.config))
    except CapacityError as error:
        return None, error
    return make_card(resolved), None


def _document(asked: AskedConfig, machine: Machine, card: Card | None, refusal: OctavoError | None) -> dict[str, Any]:
    limit, quota = machine.memory_limit, machine.cpu_quota
    return {
        "schema": SCHEMA,
        "version": __version__,
        "python": sys.version.split()[0],
        "native": _native_facts(),
        "machine": {
            "architecture": machine.architecture,
            "cpu_model": machine.cpu_model,
            "isa_flags": list(machine.isa_flags),
            "num_logical_cpus": machine.num_logical_cpus,
            "num_physical_cores": machine.num_physical_cores,
            "cpu_quota_cpus": quota.cpus if quota else None,
            "cpu_quota_path": quota.path if quota else None,
            "total_bytes": machine.total_bytes,
            "available_bytes": machine.available_bytes,
            "available_because": machine.available_because,
            "memory_limit_bytes": limit.limit_bytes if limit else None,
            "memory_limit_used_bytes": limit.used_bytes if limit else None,
            "memory_limit_path": limit.path if limit else None,
        },
        "cache": _cache_facts(),
        "config": {
            option.name: {"value": getattr(asked.config, option.name), "origin": asked.origins[option.name]}
            for option in OPTIONS
        },
        "plan": card.as_dict() if card else None,
        "refusal": {"code": refusal.code, "message": refusal.message, "hints": refusal.hints} if refusal else None,
    }


def _native_facts() -> dict[str, Any]:
    try:
        from octavo.runtime import _native
    except ImportError as error:
        return {"is_available": False, "because": str(error), "kernels": None}
    return {"is_available": True, "because": "", "kernels": _native.isa_name("auto")}


def _cache_facts() -> dict[str, Any]:
    from octavo.models.aliases import ALIASES
    from octavo.models.cache_folder import cache_folder
    from octavo.models.local_models import local_path

    try:
        folder = cache_folder(os.environ)
        models = [alias for alias in sorted(ALIASES) if local_path(alias, os.environ) is not None]
    except OctavoError as error:
        return {"folder": None, "because": str(error), "models": []}
    return {"folder": str(folder), "because": "", "models": models}


def _print_config(asked: AskedConfig) -> None:
    width = max(len(option.name) for option in OPTIONS)
    for option in OPTIONS:
        value = option.show(getattr(asked.config, option.name))
        meaning = f"  = {option.auto}" if value == "auto" else ""
        click.echo(f"{option.name:<{width}}  {value:<14} {asked.origins[option.name]}{meaning}")
    foreign = foreign_variables(os.environ)
    if foreign:
        click.echo(f"not ours, ignored: {', '.join(foreign)}", err=True)


def _print_report(asked: AskedConfig, machine: Machine, card: Card | None) -> None:
    native, cache = _native_facts(), _cache_facts()
    quota, limit = machine.cpu_quota, machine.memory_limit
    kernels = native["kernels"] if native["is_available"] else f"NumPy reference ({native['because']})"
    flags = ", ".join(machine.isa_flags) or "no flags known"
    physical, logical = machine.num_physical_cores, machine.num_logical_cpus
    lines = [
        ("octavo", f"{__version__}, Python {sys.version.split()[0]}, kernels: {kernels}"),
        ("processor", f"{machine.cpu_model or machine.architecture} ({flags})"),
        ("cores", f"{physical} physical, {logical} logical that this process may use"),
        ("CPU quota", f"{quota.cpus:g} CPUs ({quota.path})" if quota else "none"),
        ("memory", f"{format_bytes(machine.total_bytes)}, {format_bytes(machine.available_bytes)} available"),
        ("", machine.available_because),
        ("memory limit", f"{format_bytes(limit.limit_bytes)} ({limit.path})" if limit else "none"),
        ("models", f"{', '.join(cache['models']) or 'none yet'} in {cache['folder'] or cache['because']}"),
    ]
    for name, text in lines:
        click.echo(f"{name:<14}{text}")
    click.echo()
    if card is not None:
        from octavo.cli.render import print_card

        print_card(card, to_stdout=True)
        click.echo("\nnext: octavo generate -p 'The capital of France is'")
    else:
        click.echo(f"{asked.config.model} is not on this disk yet\n\nnext: octavo pull {asked.config.model}")
