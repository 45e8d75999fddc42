"""The two pictures of the report as inline SVG; colours come from its style sheet."""

from __future__ import annotations

import math
from html import escape

from octavo.planner.curves import Curve
from octavo.planner.plan import Plan
from octavo.units import format_bytes, format_concurrency

_WIDTH = 860
_BAR_HEIGHT, _BAR_TOP = 44, 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 74, 16, 46
_CHART_HEIGHT = 320
_MIN_LABEL_WIDTH = 78
_LEAST_CONCURRENCY = 0.1


def memory_svg(plan: Plan) -> str:
    """Draw the memory bar: parts to scale, each named inside where there is room, and below in any case."""
    parts = [
        ("weights", plan.weight_bytes, "--weights"),
        ("activation peak", plan.activation_peak_bytes, "--activation"),
        ("overhead", plan.overhead_bytes, "--overhead"),
        ("KV pool", plan.kv_pool_bytes, "--pool"),
        ("headroom", max(0, plan.headroom_bytes), "--free"),
    ]
    total = max(1, sum(size for _, size, _ in parts))
    shapes, legend, x, at = [], [], 0.0, 0
    for name, size, colour in parts:
        width = size / total * _WIDTH
        text = f"{name}: {format_bytes(size)}"
        shapes.append(
            f"<rect x='{x:.2f}' y='{_BAR_TOP}' width='{max(0.0, width - 1):.2f}' height='{_BAR_HEIGHT}' rx='3'"
            f" style='fill:var({colour})'><title>{text}</title></rect>"
        )
        if width >= _MIN_LABEL_WIDTH and name != "headroom":
            shapes.append(
                f"<text x='{x + 10:.1f}' y='{_BAR_TOP + 27}' style='fill:#fff;font-weight:600'>"
                f"{format_bytes(size)}</text>"
            )
        legend.append(
            f"<rect x='{at}' y='66' width='11' height='11' rx='2' style='fill:var({colour})'/>"
            f"<text x='{at + 17}' y='76'>{text}</text>"
        )
        at += 30 + round(6.6 * len(text))
        x += width
    return f"<svg viewBox='0 0 {_WIDTH} 84' role='img' aria-label='memory by part'>{''.join(shapes + legend)}</svg>"


def curves_svg(plan: Plan) -> str:
    """Draw requests at once against their length, both in powers, one line for each KV dtype."""
    lengths = plan.curves[0].lengths
    most = max(max(curve.concurrency) for curve in plan.curves)
    least = max(_LEAST_CONCURRENCY, min(min(curve.concurrency) for curve in plan.curves))
    frame = _Frame(lengths[0], lengths[-1], 10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most)))
    parts = [*_grid(frame), *_seats(plan, frame)]
    last_label = math.inf
    for curve in sorted(plan.curves, key=lambda each: each.concurrency[-1]):
        colour = f"var(--s{plan.curves.index(curve) + 1})"
        parts.append(_line(curve, frame, colour))
        label = min(frame.y(curve.concurrency[-1]) + 4, last_label - 15)
        last_label = label
        parts.append(
            f"<text x='{frame.right + 8}' y='{label:.1f}' style='fill:{colour};font-weight:600'>"
            f"{escape(curve.kv_cache_dtype)}</text>"
        )
    parts += _planned(plan, frame)
    height = _CHART_HEIGHT
    return f"<svg viewBox='0 0 {_WIDTH} {height}' role='img' aria-label='requests by length'>{''.join(parts)}</svg>"


class _Frame:
    """Where a length and a number of requests lie in the picture."""

    def __init__(self, shortest: int, longest: int, least: float, most: float) -> None:
        self.shortest, self.longest, self.least = shortest, longest, least
        self.most = most if most > least else least * 10
        self.right = _WIDTH - _RIGHT
        self.bottom = _CHART_HEIGHT - _BOTTOM

    def x(self, length: float) -> float:
        span = math.log(self.longest / self.shortest) or 1.0
        return _LEFT + math.log(max(length, self.shortest) / self.shortest) / span * (self.right - _LEFT)

    def y(self, requests: float) -> float:
        share = math.log(max(requests, self.least) / self.least) / math.log(self.most / self.least)
        return self.bottom - share * (self.bottom - _TOP)


def _grid(frame: _Frame) -> list[str]:
    parts = []
    for power in range(round(math.log10(frame.least)), round(math.log10(frame.most)) + 1):
        y = frame.y(10**power)
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{frame.right}' y1='{y:.1f}' y2='{y:.1f}'/>")
        text = f"{10**power:,}" if power >= 0 else f"{10**power:g}"
        parts.append(f"<text class='soft' x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{text}</text>")
    length = frame.shortest
    every = 1 if frame.longest / frame.shortest <= 2**10 else 2
    for step in range(64):
        if length > frame.longest:
            break
        if step % every == 0:
            x = frame.x(length)
            parts.append(
                f"<text class='soft' x='{x:.1f}' y='{frame.bottom + 18}' text-anchor='middle'>{_short(length)}</text>"
            )
        length *= 2
    parts.append(f"<line class='axis' x1='{_LEFT}' x2='{frame.right}' y1='{frame.bottom}' y2='{frame.bottom}'/>")
    middle = (_LEFT + frame.right) / 2
    parts.append(
        f"<text class='soft' x='{middle:.0f}' y='{frame.bottom + 38}' text-anchor='middle'>tokens of a request</text>"
    )
    return parts


def _seats(plan: Plan, frame: _Frame) -> list[str]:
    """Draw where the seats of a step end the use of more memory."""
    if not frame.least < plan.max_num_seqs < frame.most:
        return []
    y = frame.y(plan.max_num_seqs)
    line = f"<line class='axis' stroke-dasharray='4 4' x1='{_LEFT}' x2='{frame.right}' y1='{y:.1f}' y2='{y:.1f}'/>"
    words = f"{plan.max_num_seqs:,} seats in a step"
    return [line, f"<text class='soft' x='{_LEFT + 6}' y='{y + 15:.1f}'>{words}</text>"]


def _line(curve: Curve, frame: _Frame, colour: str) -> str:
    points = list(zip(curve.lengths, curve.concurrency, strict=True))
    path = " ".join(f"{frame.x(length):.1f},{frame.y(requests):.1f}" for length, requests in points)
    dots = "".join(
        f"<circle cx='{frame.x(length):.1f}' cy='{frame.y(requests):.1f}' r='3' style='fill:{colour}'>"
        f"<title>{curve.kv_cache_dtype}: {format_concurrency(requests)} requests of {length:,} tokens</title></circle>"
        for length, requests in points
    )
    return f"<polyline points='{path}' style='fill:none;stroke:{colour};stroke-width:2'/>{dots}"


def _planned(plan: Plan, frame: _Frame) -> list[str]:
    """Mark the plan itself."""
    if not plan.max_concurrency or not frame.shortest <= plan.max_model_len <= frame.longest:
        return []
    x, y = frame.x(plan.max_model_len), frame.y(plan.max_concurrency)
    words = f"the plan: {format_concurrency(plan.max_concurrency)} requests of {plan.max_model_len:,} tokens"
    style = "fill:none;stroke:var(--ink);stroke-width:2"
    return [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='6' style='{style}'><title>{words}</title></circle>"]


def _short(length: int) -> str:
    if length >= 2**20 and length % 2**20 == 0:
        return f"{length // 2**20}M"
    return f"{length // 1024}k" if length >= 1024 else f"{length}"
