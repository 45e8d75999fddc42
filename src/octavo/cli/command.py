"""How every command looks: options in groups, runnable examples, `-h`; and a group that loads commands when called.

Command modules are imported only when their command runs, so that `octavo --help` does not wait for them. A command
whose module is not there (a slim build, a later release) is not listed.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
DOCS = "docs/cli.md"


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command lives, and the line that help shows for it (the first line of the command's own help)."""

    module: str
    summary: str

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> click.Command:
        command = importlib.import_module(self.module).command
        assert isinstance(command, click.Command), f"{self.module}.command is no command"
        return command


class NoSuchCommand(click.UsageError):
    """A command that does not exist, and a hint at one that does."""

    def __init__(self, message: str, hint: str, ctx: click.Context) -> None:
        super().__init__(message, ctx)
        self.hint = hint


class OctavoCommand(click.Command):
    """A command whose help lists options by group and ends with examples.

    Args:
        examples: Command lines that work as they stand, without `$`.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        attributes.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for name in sorted(groups, key=_group_order):
            with formatter.section(f"{name} options"):
                formatter.write_dl(groups[name], col_max=36)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(" " * formatter.current_indent + example + "\n")
        formatter.write(f"\nAll options: {DOCS}\n")


class OctavoGroup(click.Group):
    """The top command; its commands load when they are called.

    Args:
        lazy: Command name to where it lives.
        examples: As for `OctavoCommand`.
    """

    def __init__(
        self, *args: Any, lazy: dict[str, LazyCommand], examples: Sequence[str] = (), **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self.lazy = lazy
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Answer a bare `octavo` with the help, on stderr since no data was asked for; click does it as an error."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, each in self.lazy.items() if each.is_there]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        each = self.lazy.get(cmd_name)
        return each.load() if each is not None and each.is_there else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], known, n=1, cutoff=0.5)
            hint = f"did you mean `octavo {close[0]}`?" if close else f"there are {', '.join(known)}"
            raise NoSuchCommand(f"there is no command {args[0]!r}", hint, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.lazy[name].summary) for name in self.list_commands(ctx)])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(" " * formatter.current_indent + example + "\n")
        formatter.write("\nMODEL is an alias, a folder, a .gguf file or a hub id; without one, smollm2-135m.\n")
        formatter.write(f"Each command explains itself with -h. All options: {DOCS}\n")


def split_example(example: str) -> list[str]:
    """Return the arguments of an example after `octavo`; the part from a pipe on is the shell's."""
    words = shlex.split(example, comments=True)
    assert words[0] == "octavo", example
    return words[1 : words.index("|")] if "|" in words else words[1:]


def _group_order(name: str) -> int:
    order = ("Prompt", "Sampling", "Model", "Device", "Load", "Memory", "Scheduling", "Output", "Other")
    return order.index(name) if name in order else len(order) - 2
