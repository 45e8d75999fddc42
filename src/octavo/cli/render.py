"""Drawing on the terminal: the start card, and bars for downloads and loading. The only place that imports rich.

Everything goes to stderr; colour and movement only to a terminal, and the words say the same without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from octavo.cli.options import Output
from octavo.models.download import Progress as ProgressPort
from octavo.planner.card import Card, CardPart
from octavo.units import format_bytes, format_concurrency

BAR_WIDTH = 60
_PART_STYLES = {
    "weights": ("█", "blue"),
    "activations": ("▓", "cyan"),
    "overhead": ("▒", "magenta"),
    "KV pool": ("█", "green"),
    "free": ("·", "dim"),
}


def stderr_console() -> Console:
    """Return a console for everything that is not data."""
    return Console(stderr=True, highlight=False)


@contextmanager
def progress_bars(output: Output) -> Iterator[ProgressPort]:
    """Draw what a long piece of work reports, one bar per stage.

    Without a terminal, each stage is one line when it begins; with `--quiet`, nothing.
    """
    if not output.is_live:
        yield _plain_progress(output)
        return
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=stderr_console()) as bars:

        def report(stage: str, done_bytes: int, total_bytes: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total_bytes)
            bars.update(tasks[stage], completed=done_bytes, total=total_bytes)

        yield report


@contextmanager
def count_bar(output: Output, unit: str) -> Iterator[Callable[[int, int], None] | None]:
    """Draw how far a count has come, with its rate; `None` where nothing is to be drawn."""
    if not output.is_live:
        yield None
        return
    columns = (
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr_console(), transient=True) as bars:
        task = bars.add_task("", total=1, rate="")

        def report(done: int, total: int) -> None:
            elapsed_s = bars.tasks[0].elapsed or 0.0
            bars.update(task, completed=done, total=total, rate=f"{done / elapsed_s:,.0f}/s" if elapsed_s else "")

        yield report


def print_card(card: Card, *, to_stdout: bool = False) -> None:
    """Draw the start card: a bar that adds up, what the pool holds, and each decided value with its reason.

    Args:
        to_stdout: The card is what was asked for, not an aside.
    """
    console = Console(highlight=False) if to_stdout else stderr_console()
    console.print(Text.assemble(("octavo", "bold"), f" {card.model}: {format_bytes(card.total_bytes)} of memory"))
    console.print(_memory_bar(card))
    console.print(_memory_table(card))
    console.print(
        f"KV pool: {card.num_blocks:,} blocks of {card.block_size} tokens ({format_bytes(card.block_bytes)})"
        f" = {card.pool_tokens:,} tokens"
    )
    console.print(
        f"{format_concurrency(card.max_concurrency)} requests of {card.max_model_len:,} tokens at once;"
        f" memory can grow to {format_bytes(card.resident_limit_bytes)}"
    )
    console.print(_values_table(card))


def _memory_bar(card: Card) -> Text:
    """Return a bar of `BAR_WIDTH` cells; a part too small for one gets one, taken from the largest."""
    cells = {part.name: max(1 if part.num_bytes else 0, _cells(part, card)) for part in card.parts}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += BAR_WIDTH - sum(cells.values())
    bar = Text("[")
    for part in card.parts:
        mark, style = _PART_STYLES[part.name]
        bar.append(mark * cells[part.name], style=style)
    return bar.append("]")


def _cells(part: CardPart, card: Card) -> int:
    return round(part.num_bytes / card.total_bytes * BAR_WIDTH)


def _memory_table(card: Card) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for part in card.parts:
        mark, style = _PART_STYLES[part.name]
        table.add_row(Text.assemble((mark, style), f" {part.name}"), _mib(part.num_bytes))
    table.add_row("= total", _mib(card.total_bytes))
    return table


def _values_table(card: Card) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for line in card.lines:
        table.add_row(line.name.replace("_", "-"), line.value, line.reason)
    return table


def _mib(num_bytes: int) -> str:
    # One unit for the column, so that a reader can add it up.
    return f"{num_bytes / 2**20:,.1f} MiB"


def _plain_progress(output: Output) -> ProgressPort:
    seen: set[str] = set()

    def report(stage: str, done_bytes: int, total_bytes: int | None) -> None:  # noqa: ARG001 - the port's signature
        if stage in seen or output.is_quiet:
            return
        seen.add(stage)
        size = f" {format_bytes(total_bytes)}" if total_bytes else ""
        stderr_console().print(f"{stage}{size}")

    return report
