"""The picture of the KV cache: one bar per request from its real block table, the pool, and what is wasted.

    paged allocator, blocks of 16 tokens    █ full  ▓ shared  ▌ partly filled  ░ held, empty  · free
             a cell is a block          tokens  blocks  shared   empty
    pool     ████████·········              70       8       2      26
    0        ▓▓█▌                           55       4       2       9

Drawn by `octavo generate --show-kv` while the requests run; for a reserved allocator the same picture shows what was
set aside and never written.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from octavo.core.snapshot import RequestView, Snapshot
from octavo.core.step import NULL_BLOCK

FULL, SHARED, PARTIAL, EMPTY, FREE, GONE = "█", "▓", "▌", "░", "·", " "
_STYLES = {FULL: "green", SHARED: "cyan", PARTIAL: "green", EMPTY: "red", FREE: "dim", GONE: ""}
_LEGEND = ((FULL, "full"), (SHARED, "shared"), (PARTIAL, "partly filled"), (EMPTY, "held, empty"), (FREE, "free"))
_COLUMNS = ("tokens", "blocks", "shared", "empty")
_COLUMN_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUse:
    """How well held blocks are used; in a pool's, shared blocks count once.

    Args:
        num_blocks: Blocks held.
        num_shared_blocks: Those that several requests hold.
        num_filled_places: Token places in them that hold K/V.
        num_empty_places: Token places in them that do not: what is wasted.
    """

    num_blocks: int
    num_shared_blocks: int
    num_filled_places: int
    num_empty_places: int

    @property
    def fill_ratio(self) -> float:
        num_places = self.num_filled_places + self.num_empty_places
        return self.num_filled_places / num_places if num_places else 1.0


def measure_pool(snapshot: Snapshot) -> KVUse:
    """Measure all held blocks, each as full as the fullest of its holders has made it."""
    filled: dict[int, int] = {}
    for request in snapshot.requests:
        for block_id, num_tokens in _held(request, snapshot.block_size):
            filled[block_id] = max(filled.get(block_id, 0), num_tokens)
    return _use(filled, snapshot)


def measure_request(request: RequestView, snapshot: Snapshot) -> KVUse:
    """Measure the blocks one request holds, shared ones included."""
    return _use(dict(_held(request, snapshot.block_size)), snapshot)


def draw(snapshot: Snapshot, *, allocator: str, width: int, max_requests: int = 24) -> RenderableType:
    """Draw a snapshot.

    Args:
        allocator: `paged` or `reserved`.
        width: Columns to draw in; where bars do not fit, a cell stands for several blocks.
        max_requests: Requests drawn; a last line counts the others.
    """
    running = [request for request in snapshot.requests if request.tables]
    shown = running[:max_requests]
    label_width = 2 + max([7, *(len(_name(request)) for request in shown)])
    bar_width = max(10, width - label_width - _COLUMN_WIDTH * len(_COLUMNS))
    longest = max([1, *(len(cells(request, snapshot)) for request in running)])
    # One scale for all requests, so that their bars can be compared.
    blocks_per_cell = -(-longest // bar_width)
    scale = "a cell is a block" if blocks_per_cell == 1 else f"a cell is {blocks_per_cell} blocks"
    pool = measure_pool(snapshot)
    lines = [
        _legend(allocator, snapshot.block_size),
        Text(" " * label_width + scale.ljust(bar_width), style="dim").append(
            "".join(f"{name:>{_COLUMN_WIDTH}}" for name in _COLUMNS)
        ),
        _line("pool", label_width, _pool_bar(pool, snapshot, bar_width), bar_width, pool),
    ]
    for request in shown:
        bar = _request_bar(cells(request, snapshot), blocks_per_cell)
        lines.append(_line(_name(request), label_width, bar, bar_width, measure_request(request, snapshot)))
    lines.append(_summary(pool, snapshot, num_hidden=len(running) - len(shown)))
    return Group(*lines)


def cells(request: RequestView, snapshot: Snapshot) -> str:
    """Return one mark per block of a request, over all its groups."""
    marks = []
    for table in request.tables:
        for index, block_id in enumerate(table):
            num_tokens = _tokens_in(request, index, snapshot.block_size)
            if block_id == NULL_BLOCK:
                marks.append(GONE)
            elif num_tokens == 0:
                marks.append(EMPTY)
            elif snapshot.holders[block_id] > 1:
                marks.append(SHARED)
            else:
                marks.append(FULL if num_tokens == snapshot.block_size else PARTIAL)
    return "".join(marks)


def _held(request: RequestView, block_size: int) -> list[tuple[int, int]]:
    """Return (block id, filled places) of every block a request holds."""
    return [
        (block_id, _tokens_in(request, index, block_size))
        for table in request.tables
        for index, block_id in enumerate(table)
        if block_id != NULL_BLOCK
    ]


def _tokens_in(request: RequestView, index: int, block_size: int) -> int:
    return min(block_size, max(0, request.num_computed_tokens - index * block_size))


def _use(filled: dict[int, int], snapshot: Snapshot) -> KVUse:
    num_filled = sum(filled.values())
    return KVUse(
        num_blocks=len(filled),
        num_shared_blocks=sum(snapshot.holders.get(block_id, 0) > 1 for block_id in filled),  # type: ignore[call-overload]
        num_filled_places=num_filled,
        num_empty_places=len(filled) * snapshot.block_size - num_filled,
    )


def _legend(allocator: str, block_size: int) -> Text:
    legend = Text(f"{allocator} allocator, blocks of {block_size} tokens\n", style="bold")
    for mark, meaning in _LEGEND:
        legend.append(mark, style=_STYLES[mark])
        legend.append(f" {meaning}   ", style="dim")
    return legend


def _pool_bar(pool: KVUse, snapshot: Snapshot, bar_width: int) -> Text:
    scale = min(1.0, bar_width / snapshot.num_usable_blocks)
    num_cells = round(snapshot.num_usable_blocks * scale)
    num_held = min(num_cells, -int(-pool.num_blocks * scale // 1))
    bar = Text(FULL * num_held, style=_STYLES[FULL])
    return bar.append(FREE * (num_cells - num_held), style=_STYLES[FREE])


def _request_bar(marks: str, blocks_per_cell: int) -> Text:
    """Return a bar; a cell that stands for several blocks shows the last of them, so that the growing end is seen."""
    bar = Text()
    for first in range(0, len(marks), blocks_per_cell):
        mark = marks[min(first + blocks_per_cell, len(marks)) - 1]
        bar.append(mark, style=_STYLES[mark])
    return bar


def _line(label: str, label_width: int, bar: Text, bar_width: int, use: KVUse) -> Text:
    numbers = (use.num_filled_places, use.num_blocks, use.num_shared_blocks, use.num_empty_places)
    line = Text(label.ljust(label_width), no_wrap=True)
    line.append_text(bar)
    line.append(" " * (bar_width - len(bar)))
    return line.append("".join(f"{number:>{_COLUMN_WIDTH},}" for number in numbers))


def _summary(pool: KVUse, snapshot: Snapshot, *, num_hidden: int) -> Text:
    num_waiting = sum(not request.tables for request in snapshot.requests)
    parts = [
        f"{pool.num_blocks:,} of {snapshot.num_usable_blocks:,} blocks held",
        f"{pool.fill_ratio:.0%} of their places filled, {1 - pool.fill_ratio:.0%} wasted",
    ]
    parts += [f"{num_hidden:,} more running"] if num_hidden else []
    parts += [f"{num_waiting:,} waiting"] if num_waiting else []
    return Text("; ".join(parts))


def _name(request: RequestView) -> str:
    return str(request.request_id).partition("-")[2] or str(request.request_id)
