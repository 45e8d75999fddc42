"""The chart of `octavo eval kv --report`: mean divergence by position, a line for each variant, as one SVG.

Colours stand for dtypes and dashes for ways to read. Every line is named at its end, names one below the other however
close the lines end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

STYLE = """
svg { width: 100%; height: auto; font: 13px system-ui; } svg text { fill: #1c1e21; }
.grid { stroke: #d8dbe0; } .axis { stroke: #6b7280; } .leader { stroke: #9aa1ab; fill: none; }
.line { fill: none; stroke-width: 2.5; } .dot { stroke: none; }
.f32 { stroke: #4b5563; fill: #4b5563; } .f16 { stroke: #2563eb; fill: #2563eb; }
.bf16 { stroke: #b45309; fill: #b45309; } .int8 { stroke: #0f8a4b; fill: #0f8a4b; }
.fp8_e4m3 { stroke: #c2410c; fill: #c2410c; } .int4 { stroke: #7c3aed; fill: #7c3aed; }
.line { fill: none; }
@media (prefers-color-scheme: dark) {
  svg text { fill: #e6e8eb; } .grid { stroke: #3a3f47; } .leader { stroke: #6b7280; }
  .f32 { stroke: #d1d5db; fill: #d1d5db; } .f16 { stroke: #60a5fa; fill: #60a5fa; }
  .bf16 { stroke: #fbbf24; fill: #fbbf24; } .int8 { stroke: #4ade80; fill: #4ade80; }
  .fp8_e4m3 { stroke: #fb923c; fill: #fb923c; } .int4 { stroke: #a78bfa; fill: #a78bfa; }
  .line { fill: none; }
}
"""
_WIDTH, _LEFT, _TOP, _BOTTOM = 760, 76, 30, 56
_LEAST_HEIGHT = 380
_NAME_HEIGHT, _NAME_LETTER = 17, 7.2
_LEADER = 26
_FLOOR = 1e-8
"""Smaller divergences are drawn here: the axis is logarithmic."""
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2")

Scale = Callable[[float], float]


def chart(variants: Sequence[dict[str, Any]]) -> str:
    """Draw the mean divergence of each bucket at its middle position; what is infinite is left out."""
    buckets = variants[0]["buckets"]
    right = _WIDTH - _LEADER - 8 - _NAME_LETTER * max(len(each["label"]) for each in variants)
    height = max(_LEAST_HEIGHT, _TOP + _BOTTOM + _NAME_HEIGHT * len(variants))
    values = [each["kl_mean"] for variant in variants for each in variant["buckets"] if each["kl_mean"] is not None]
    low, high = _powers(values)
    last: int = buckets[-1]["last_position"]
    bottom = height - _BOTTOM

    def x(position: float) -> float:
        return round(_LEFT + position / last * (right - _LEFT), 1)

    def y(value: float) -> float:
        share: float = (log10(max(value, _FLOOR)) - low) / (high - low)
        return round(bottom - share * (bottom - _TOP), 1)

    title = "Mean KL divergence, by position"
    parts = [
        *(_grid_line(power, y(10.0**power), right) for power in range(low, high + 1)),
        *(_range_name(each, x, bottom) for each in buckets),
        f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
        *_lines(variants, x, y, bottom),
        f'<text x="{(_LEFT + right) / 2}" y="{height - 10}" text-anchor="middle">position in the text</text>',
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">'
        f"<title>{title}</title>{''.join(parts)}</svg>"
    )


def _powers(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten that the axis begins and ends at."""
    drawn = [max(each, _FLOOR) for each in values] or [_FLOOR]
    low, high = floor(log10(min(drawn))), ceil(log10(max(drawn)))
    return low, high + (low == high)


def _grid_line(power: int, at: float, right: float) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">1e{power}</text>'
    )


def _range_name(bucket: dict[str, Any], x: Scale, bottom: float) -> str:
    name = f"{bucket['first_position']:,}-{bucket['last_position']:,}"
    return f'<text x="{_middle(bucket, x)}" y="{bottom + 20}" text-anchor="middle">{name}</text>'


def _middle(bucket: dict[str, Any], x: Scale) -> float:
    return x((bucket["first_position"] + bucket["last_position"]) / 2)


def _lines(variants: Sequence[dict[str, Any]], x: Scale, y: Scale, bottom: float) -> list[str]:
    ways = list(dict.fromkeys((each["attention_window"], each["sparse_blocks"]) for each in variants))
    parts, ends = [], []
    for variant in variants:
        colour = variant["kv_cache_dtype"]
        dashes = _DASHES[ways.index((variant["attention_window"], variant["sparse_blocks"])) % len(_DASHES)]
        drawn = [each for each in variant["buckets"] if each["kl_mean"] is not None]
        places = [(_middle(each, x), y(each["kl_mean"])) for each in drawn]
        if not places:
            continue
        path = " ".join(f"{left},{top}" for left, top in places)
        parts.append(f'<polyline class="line {colour}" stroke-dasharray="{dashes}" points="{path}"/>')
        parts += [f'<circle class="dot {colour}" cx="{left}" cy="{top}" r="4"/>' for left, top in places]
        ends.append((*places[-1], variant["label"]))
    ends.sort(key=lambda end: end[1])
    names_left = max((left for left, _, _ in ends), default=0.0) + _LEADER
    for (left, top, label), name_top in zip(ends, _spread([top for _, top, _ in ends], bottom), strict=True):
        if name_top != top:
            parts.append(f'<path class="leader" d="M{left + 5} {top}L{names_left - 4} {name_top}"/>')
        parts.append(f'<text x="{names_left}" y="{round(name_top + 4, 1)}">{escape(label)}</text>')
    return parts


def _spread(tops: Sequence[float], bottom: float) -> list[float]:
    """Move ascending heights apart until none is nearer than a name is high, staying above the bottom."""
    spread: list[float] = []
    for top in tops:
        spread.append(max(top, spread[-1] + _NAME_HEIGHT) if spread else top)
    limit = bottom
    for index in range(len(spread) - 1, -1, -1):
        spread[index] = min(spread[index], limit)
        limit = spread[index] - _NAME_HEIGHT
    return spread
