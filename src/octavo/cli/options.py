"""Engine options on the command line, made from the one option table, and the output options of every command.

    @click.command("generate", cls=OctavoCommand, examples=...)
    @engine_options
    @output_options
    def command(asked: AskedConfig, output: Output) -> None: ...

A command gets its engine options as one `AskedConfig` (flags over environment over defaults, each value with its
origin) and its output options as one `Output`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from octavo.config.engine import OPTIONS
from octavo.config.option import Option
from octavo.config.sources import Source, ask, environment_source
from octavo.errors import InvalidParameterError

Command = Callable[..., Any]

REFUSED_FLAGS = {
    "--tensor-parallel-size": "Octavo runs one model in one process",
    "--pipeline-parallel-size": "Octavo runs one model in one process",
    "--data-parallel-size": "start one server per copy, on ports of their own",
    "--swap-space": "a preempted request is recomputed, and keeps its full blocks while they last",
    "--cpu-offload-gb": "weights and KV cache are in main memory already",
    "--enable-lora": "adapters are not supported",
    "--quantization": "`--weight-dtype int8` or `int4` chooses how weights are held",
    "--enforce-eager": "there are no captured graphs to turn off",
    "--enable-chunked-prefill": "long prompts are always computed in chunks of `--max-num-batched-tokens`",
    "--trust-remote-code": "code of a model repository is never run",
}
"""Flags of other engines that have no meaning here, and what to know instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a command speaks: data goes to stdout, everything else to stderr."""

    is_json: bool
    is_quiet: bool

    @property
    def is_live(self) -> bool:
        """Whether bars and other moving things may be drawn."""
        return not self.is_quiet and sys.stderr.isatty()


class GroupedOption(click.Option):
    """An option that help lists under a heading."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


def engine_options(function: Command) -> Command:
    """Add MODEL and every engine option; the command receives them as `asked`."""
    decorate = table_options(OPTIONS, lambda flags: {"asked": ask(flags, environment_source(os.environ))})
    return decorate(function)


def table_options(
    options: Sequence[Option], read: Callable[[Source], Mapping[str, Any]]
) -> Callable[[Command], Command]:
    """Add the options of a table, hidden spellings included.

    Args:
        read: Makes the arguments that the command receives in place of the options, from the flags that were given.
    """
    destinations = {
        destination: option
        for option in options
        for destination in (
            option.name,
            _alias_destination(option.name),
            *(_alias_destination(alias) for alias in option.aliases),
        )
    }

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            made = read(_flag_source(values, destinations))
            rest = {name: value for name, value in values.items() if name not in destinations}
            return function(**made, **rest)

        for option in reversed(options):
            for add in reversed(_click_options(option)):
                wrapper = add(wrapper)
        return wrapper

    return decorate


def output_options(function: Command) -> Command:
    """Add `--json` and `--quiet`; the command receives them as `output`."""

    @functools.wraps(function)
    def wrapper(*, is_json: bool, is_quiet: bool, **values: Any) -> Any:
        return function(output=Output(is_json=is_json, is_quiet=is_quiet), **values)

    quiet = click.option(
        "-q", "--quiet", "is_quiet", cls=GroupedOption, group="Output", is_flag=True, help="Say nothing but the answer"
    )
    as_json = click.option(
        "--json", "is_json", cls=GroupedOption, group="Output", is_flag=True, help="Write one JSON document to stdout"
    )
    return as_json(quiet(wrapper))


def help_of(option: Option) -> str:
    """Return an option's help with its unit and default."""
    default = option.auto or option.show(option.default)
    notes = [option.unit] if option.unit and option.kind != "bytes" else []
    return f"{option.help}  [{'; '.join([*notes, f'default: {default}'])}]"


def _click_options(option: Option) -> list[Command]:
    if option.is_positional:
        hidden = [_hidden(option.name, takes_value=True)]
        return [click.argument(option.name, required=False, metavar=f"[{option.name.upper()}]"), *hidden]
    if option.kind == "flag":
        spelling = f"--{option.flag_name}/--no-{option.flag_name}"
        main = click.option(
            spelling, option.name, cls=GroupedOption, group=option.group, default=None, help=help_of(option)
        )
        names = [option.name, *option.aliases]
        return [main, *(_hidden(name) for name in names if name.replace("_", "-") != option.flag_name)]
    main = click.option(
        f"--{option.flag_name}",
        option.name,
        cls=GroupedOption,
        group=option.group,
        metavar=_metavar(option),
        multiple=option.kind == "list",
        help=help_of(option),
    )
    return [main, *(_hidden(alias, takes_value=True) for alias in option.aliases)]


def _hidden(alias: str, *, takes_value: bool = False) -> Command:
    spelling = f"--{alias.replace('_', '-')}"
    if not takes_value:
        spelling += f"/--no-{alias.replace('_', '-')}"
    return click.option(spelling, _alias_destination(alias), default=None, hidden=True)


def _alias_destination(alias: str) -> str:
    return f"alias_{alias}"


def _flag_source(given: Mapping[str, Any], destinations: Mapping[str, Option]) -> Source:
    """Return what flags say; `destinations` has every name under which a value of the table can arrive."""
    values: dict[str, object] = {}
    spellings: dict[str, str] = {}
    for destination, value in given.items():
        option = destinations.get(destination)
        if option is None or value is None or value == ():  # click's word for a repeatable one that was not given
            continue
        spelling = _spelling(option, destination, value)
        if option.name in values:
            raise InvalidParameterError(f"says the same as {spellings[option.name]}, give one", param=spelling)
        values[option.name] = value
        spellings[option.name] = spelling
    return Source(name="flag", values=values, spellings=spellings)


def _spelling(option: Option, destination: str, value: object) -> str:
    if option.is_positional and destination == option.name:
        return option.name.upper()
    word = option.flag_name if destination == option.name else destination.removeprefix("alias_").replace("_", "-")
    return f"--no-{word}" if value is False else f"--{word}"


def _metavar(option: Option) -> str:
    match option.kind:
        case "choice":
            return "|".join(option.choices)
        case "bytes":
            return "SIZE"
        case "ratio":
            return "RATIO"
        case "text" | "list":
            return "TEXT"
        case "numbers":
            return "N,N,..."
        case "seconds":
            return "SECONDS"
        case _:
            return "N"
