"""Where each buffer of a Program lies in one stretch of memory, so that buffers that are never alive together share it.

The runner allocates exactly `Arena.total_bytes`, and the planner prints the same number as activation peak.

    op          Embed  Norm  Linear  Attend  Linear  Add  ...        alive: from the op that fills a buffer to the
    x             |------------------------------------|             last op that reads what it was filled with; a
    h                   |------|                                     buffer that each layer fills anew is dead in
    qkv                        |--------|                            between, and its bytes are others' meanwhile
    attn                                |-------|
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.models.program import (
    Activate,
    Add,
    Attend,
    BufferName,
    Combine,
    Embed,
    EmbedPosition,
    ExpertLinear,
    HeadRmsNorm,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    Route,
    SelectRows,
    SoftCap,
)
from octavo.units import round_up

ALIGNMENT_BYTES = 64
FLOAT_BYTES = 4
STRIDE_MULTIPLE = ALIGNMENT_BYTES // FLOAT_BYTES
"""Rows start at a multiple of so many floats, so that every row of every buffer is aligned for vector loads."""

Span = tuple[int, int]
"""First and last op (both included) between which a buffer holds something that is still wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Byte offset of each buffer, each a multiple of `ALIGNMENT_BYTES`, and the size of the whole."""

    offsets: Mapping[BufferName, int] = field(hash=False)
    total_bytes: int


def lay_out(program: Program, *, num_token_rows: int, num_selected_rows: int) -> Arena:
    """Place the buffers of a program for steps of up to so many rows.

    Largest first, each at the lowest place that is free during its life: not always the least total, but for the
    decoders here it equals the peak of what is alive at once or comes within a few percent.
    """
    rows = {"token": num_token_rows, "selected": num_selected_rows}
    sizes = {
        name: row_stride(buffer.width) * FLOAT_BYTES * rows[buffer.rows] for name, buffer in program.buffers.items()
    }
    spans = live_spans(program)
    offsets: dict[BufferName, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        rivals = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if _overlap(spans.get(name, ()), spans.get(other, ()))
        )
        place = 0
        for begin, end in rivals:
            if place + sizes[name] <= begin:
                break
            place = max(place, end)
        offsets[name] = place
    total = max((offsets[name] + sizes[name] for name in offsets), default=0)
    return Arena(offsets=offsets, total_bytes=round_up(total, ALIGNMENT_BYTES))


def row_stride(width: int) -> int:
    """Return the floats from one row of a buffer to the next."""
    return round_up(width, STRIDE_MULTIPLE)


def live_spans(program: Program) -> dict[BufferName, tuple[Span, ...]]:
    """Return when each buffer holds something wanted, as spans of op numbers in order.

    A buffer that is filled but never read is alive at its own op: it is written all the same. The logits stay alive to
    the end, since the runner reads them after the last op. So does what rows are selected from: when more rows are
    selected than the logits buffer holds, the ops from `SelectRows` on run again for the next tile of rows.
    """
    spans: dict[BufferName, list[Span]] = {}
    for number, op in enumerate(program.ops):
        reads, fills = buffers_of(op)
        for name in reads:
            assert name in spans, f"op {number} ({type(op).__name__}) reads {name!r}, which no op filled"
            spans[name][-1] = (spans[name][-1][0], number)
        for name in fills:
            if name not in reads:
                spans.setdefault(name, []).append((number, number))
    lasting = {program.logits} | {op.x for op in program.ops if isinstance(op, SelectRows)}
    for name in lasting & spans.keys():
        spans[name][-1] = (spans[name][-1][0], len(program.ops))
    return {name: tuple(each) for name, each in spans.items()}


def buffers_of(op: Op) -> tuple[frozenset[BufferName], frozenset[BufferName]]:
    """Return the buffers whose content an op needs, and those it fills completely."""
    match op:
        case Embed(out=out) | EmbedPosition(out=out):
            return frozenset(), frozenset({out})
        case (
            RmsNorm(x=x, out=out)
            | LayerNorm(x=x, out=out)
            | Linear(x=x, out=out)
            | Activate(x=x, out=out)
            | Route(x=x, out=out)
            | SelectRows(x=x, out=out)
        ):
            return frozenset({x}), frozenset({out})
        case HeadRmsNorm(x=x) | SoftCap(x=x):
            return frozenset({x}), frozenset()
        case ExpertLinear(x=x, routes=routes, out=out, gathered=gathered, product=product):
            return frozenset({x, routes}), frozenset({out, gathered, product})
        case Combine(x=x, routes=routes, out=out):
            return frozenset({x, routes}), frozenset({out})
        case RopeStore(qkv=qkv, sink_q=sink_q):
            return frozenset({qkv}), frozenset({sink_q} if sink_q else ())
        case Attend(qkv=qkv, out=out, sink_q=sink_q):
            return frozenset({qkv, sink_q} if sink_q else {qkv}), frozenset({out})
        case Add(x=x, y=y):
            return frozenset({x, y}), frozenset()


def _overlap(one: tuple[Span, ...], other: tuple[Span, ...]) -> bool:
    """Whether two buffers are ever alive together; both lists of spans are in order, so one walk tells."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False
