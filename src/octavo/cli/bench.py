"""`octavo bench`: measure speed on this machine."""

from __future__ import annotations

import click

from octavo.cli.command import CONTEXT, LazyCommand, OctavoGroup

COMMANDS = {
    "offline": LazyCommand("octavo.cli.bench_offline", "Run a workload as fast as the engine can"),
    "serve": LazyCommand("octavo.cli.bench_serve", "Put a load on a server and measure what its clients would see"),
    "recompute": LazyCommand("octavo.cli.bench_recompute", "Time a token with the KV cache and without"),
    "kernels": LazyCommand("octavo.cli.bench_kernels", "Time each kernel against the machine's limits"),
}


@click.group(
    "bench",
    cls=OctavoGroup,
    lazy=COMMANDS,
    context_settings=CONTEXT,
    examples=tuple(
        example
        for example in (
            "octavo bench offline --workload workload.json",
            "octavo bench serve --base-url http://127.0.0.1:8000/v1 --workload workload.json",
            "octavo bench recompute --lengths 128,512",
            "octavo bench kernels",
        )
        if COMMANDS[example.split()[2]].is_there
    ),
)
def command() -> None:
    """Measure speed on this machine.

    Figures of a shared or hot machine move by tens of percent: repeat, and compare within one run.
    """
