"""`octavo eval`: measure quality on text."""

from __future__ import annotations

import click

from octavo.cli.command import CONTEXT, LazyCommand, OctavoGroup

COMMANDS = {"kv": LazyCommand("octavo.cli.eval_kv", "What a smaller KV cache costs, and what it gains")}


@click.group(
    "eval",
    cls=OctavoGroup,
    lazy=COMMANDS,
    context_settings=CONTEXT,
    examples=("octavo eval kv --kv-cache-dtype f16,int8",),
)
def command() -> None:
    """Measure quality on text."""
