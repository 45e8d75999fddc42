"""What `octavo top` draws: the last minute, the pool as a field of marks, requests with their block tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.cli.live_document import CACHED, COPIED, EMPTY, IN_USE, SHARED, LivePool, expand
from octavo.units import format_bytes

_MARKS = {EMPTY: "·", CACHED: "░", IN_USE: "█", SHARED: "▓", COPIED: "◆"}
_STYLES = {EMPTY: "dim", CACHED: "blue", IN_USE: "bright_blue", SHARED: "yellow", COPIED: "bold"}
_WORDS = {EMPTY: "free", CACHED: "cached", IN_USE: "in use", SHARED: "shared", COPIED: "being copied"}
_SPARKS = " ▁▂▃▄▅▆▇█"
_LATENCIES = (("ttft_s", "first token"), ("itl_s", "between tokens"), ("queue_s", "queue"), ("e2e_s", "whole answer"))
_WAITING = {"seats": "a seat", "tokens": "token budget", "blocks": "blocks", "prefix": "a shared prefix"}
MAP_ROWS = 8


def draw(pool: LivePool, *, width: int, height: int | None = None) -> RenderableType:
    """Draw a document.

    Args:
        width: Columns.
        height: Lines; requests that do not fit are counted instead. `None` draws all.
    """
    document = pool.document
    parts: list[RenderableType] = [
        _head(document),
        *_figures(document, width),
        Text(),
        _map(pool, width),
        _legend(pool),
    ]
    parts += [Text(), _latency(document)]
    parts += [Text(f"! {_plain(advice)}", style="yellow") for advice in document["advice"]]
    num_rows = None if height is None else max(1, height - MAP_ROWS - 20 - 2 * len(document["advice"]))
    parts += [Text(), *_requests(pool, width, num_rows)]
    return Group(*parts)


def _head(document: Mapping[str, Any]) -> Text:
    size = f"{document['num_blocks']:,} blocks of {document['block_size_tokens']} tokens"
    total = format_bytes(document["num_blocks"] * document["block_bytes"])
    return Text.assemble(("octavo", "bold"), f" {_plain(document['model'])}: {size}, {total}")


def _figures(document: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    totals, means, rates = document["totals"], document["means"], document["rates"]
    hit_ratio = means["hit_ratio"]
    rows = (
        ("KV in use", f"{totals['usage_ratio']:.0%}", f"{totals['referenced_blocks']:,} blocks", "usage_ratio", 1.0),
        ("prefix hits", "-" if hit_ratio is None else f"{hit_ratio:.0%}", "of prompt tokens", "hit_ratio", 1.0),
        ("output", f"{means['output_tokens_per_s']:,.1f}", "tokens/s", "output_tokens_per_s", None),
        ("requests", f"{totals['num_running']:,}", f"{totals['num_waiting']:,} waiting", "running", None),
        ("preemptions", f"{means['preemptions_per_min']:,.0f}", "a minute", "preemptions_per_min", None),
    )
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for label, figure, unit, series, ceiling in rows:
        line = _spark(rates[series][-max(10, width - 45) :], ceiling)
        table.add_row(label, Text(figure, style="bold"), Text(unit, style="dim"), Text(line, style="bright_blue"))
    yield table


def _spark(values: Sequence[float | None], ceiling: float | None) -> str:
    known = [value or 0.0 for value in values]
    top = ceiling or max([*known, 1e-9])
    return "".join(_SPARKS[min(8, -int(-8 * value / top // 1))] for value in known)


def _map(pool: LivePool, width: int) -> Text:
    """Draw the pool in at most `MAP_ROWS` lines; a mark that stands for several blocks shows the busiest."""
    num_blocks = len(pool.states)
    per_mark = -(-num_blocks // (width * MAP_ROWS))
    text = Text()
    for row in range(0, num_blocks, width * per_mark):
        for first in range(row, min(row + width * per_mark, num_blocks), per_mark):
            state = max(pool.states[first : first + per_mark])
            text.append(_MARKS[state], style=_STYLES[state])
        text.append("\n")
    text.rstrip()
    return text


def _legend(pool: LivePool) -> Text:
    legend = Text()
    for state, mark in _MARKS.items():
        legend.append(mark, style=_STYLES[state])
        legend.append(f" {_WORDS[state]} {pool.count(state):,}   ", style="dim")
    return legend


def _latency(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("last minute", min_width=14)
    for percent in ("p50", "p90", "p99"):
        table.add_column(percent, justify="right", min_width=8)
    for name, label in _LATENCIES:
        cells = (document["latency"][name][percent] for percent in ("p50", "p90", "p99"))
        table.add_row(label, *("-" if value is None else f"{value:.3f} s" for value in cells))
    return table


def _requests(pool: LivePool, width: int, num_rows: int | None) -> Iterator[RenderableType]:
    requests = pool.document["requests"]
    shown = requests[:num_rows]
    tables = {id(one): [block for runs in one["tables"] or () for block in expand(runs)] for one in shown}
    # One scale for all requests, so that their bars can be compared.
    bar_width = max(10, width - 80)
    per_mark = max(1, -(-max([1, *map(len, tables.values())]) // bar_width))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("request", no_wrap=True, max_width=24)
    table.add_column("state", no_wrap=True)
    for name in ("prompt", "cached", "output", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("blocks", no_wrap=True)
    for one in shown:
        bar = _bar(tables[id(one)], pool.states, per_mark)
        numbers = (f"{one[f'num_{name}_tokens']:,}" for name in ("prompt", "hit", "output"))
        table.add_row(Text(_short_id(_plain(one["id"]))), _state(one), *numbers, f"{one['age_s']:.1f} s", bar)
    if shown:
        yield table
    num_hidden = len(requests) - len(shown) + pool.document["num_requests_left_out"]
    if num_hidden or not shown:
        yield Text(f"{num_hidden:,} more" if num_hidden else "nothing runs", style="dim")


def _short_id(request_id: str) -> str:
    """Return the beginning of an id, and which of its answers it is."""
    name, slash, answer = request_id.partition("/")
    return (f"{name[:17]}…" if len(name) > 18 else name) + slash + answer


def _state(request: Mapping[str, Any]) -> Text:
    if request["status"] == "running":
        return Text("running")
    reason = _WAITING.get(request["wait_reason"])
    return Text(f"waits for {reason}" if reason else "waiting", style="dim")


def _bar(block_ids: Sequence[int], states: bytes, per_mark: int) -> Text:
    bar = Text()
    for first in range(0, len(block_ids), per_mark):
        held = [states[block - 1] for block in block_ids[first : first + per_mark] if 0 < block <= len(states)]
        state = max(held, default=EMPTY)
        bar.append(_MARKS[state], style=_STYLES[state])
    return bar


def _plain(text: str) -> str:
    """Keep what a server sends from steering the terminal."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
