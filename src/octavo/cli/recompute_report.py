"""The chart of `octavo bench recompute` as a file: one SVG, or one HTML document with chart, table and settings.

Nothing is loaded from elsewhere; colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import Any

from octavo.cli.recompute_view import format_seconds, growth_exponent

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 150, 40, 56
_SERIES = (
    ("recomputed_s_per_token", "recomputed", "recomputed"),
    ("cached_s_per_token", "with the KV cache", "cached"),
)
_STYLE = """
svg { font: 13px system-ui, sans-serif; }
svg text { fill: #1c1e21; } .grid { stroke: #d8dbe0; } .axis { stroke: #6b7280; }
.cached { stroke: #0f8a4b; } .recomputed { stroke: #c2410c; }
.dot.cached { fill: #0f8a4b; } .dot.recomputed { fill: #c2410c; }
.line { fill: none; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  svg text { fill: #e6e8eb; } .grid { stroke: #3a3f47; } .axis { stroke: #9aa1ac; }
  .cached { stroke: #4ade80; } .recomputed { stroke: #fb923c; }
  .dot.cached { fill: #4ade80; } .dot.recomputed { fill: #fb923c; }
}
"""
_DOCUMENT_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem;
  background: #fff; color: #1c1e21; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .3rem .6rem; }
th { border-bottom: 1px solid #6b7280; } svg { width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { body { background: #15171a; color: #e6e8eb; } }
"""


def svg_chart(document: dict[str, Any]) -> str:
    """Return a chart of time per token over length, both axes logarithmic."""
    return _Chart(document).draw()


def html_report(document: dict[str, Any]) -> str:
    """Return a whole document: what was measured, chart, table, settings."""
    rows = "\n".join(
        "<tr>"
        + "".join(
            f"<td>{cell}</td>"
            for cell in (
                f"{point['context_tokens']:,}",
                format_seconds(point["cached_s_per_token"]),
                format_seconds(point["recomputed_s_per_token"]),
                f"{point['recomputed_to_cached_ratio']:,.1f}x",
                format_seconds(point["cached_total_estimate_s"]),
                format_seconds(point["recomputed_total_estimate_s"]),
            )
        )
        + "</tr>"
        for point in document["points"]
    )
    config = document["config"]
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Recomputing against the KV cache: {escape(str(config["model"]))}</title>
<style>{_DOCUMENT_STYLE}</style></head>
<body>
<h1>What the KV cache saves</h1>
<p>Time for one token after so many others, {escape(str(config["model"]))}, {config["threads"]} threads,
{escape(str(config["runner"]))} runner. Medians; the sums, for writing so many tokens,
are estimates from them.</p>
{svg_chart(document)}
<table>
<thead><tr><th>tokens</th><th>cached</th><th>recomputed</th><th>ratio</th>
<th>sum cached</th><th>sum recomputed</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


class _Chart:
    """Places points on two logarithmic axes whose ends are whole powers of ten (seconds) and the lengths measured."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._points = document["points"]
        lengths = [point["context_tokens"] for point in self._points]
        seconds = [point[name] for point in self._points for name, _, _ in _SERIES]
        self._first_length, self._last_length = lengths[0], max(lengths[-1], lengths[0] + 1)
        self._low, self._high = floor(log10(min(seconds))), ceil(log10(max(seconds)))
        self._high += self._low == self._high

    def draw(self) -> str:
        parts = [self._grid(), *(self._series(*series) for series in _SERIES)]
        title = "Time per token, by tokens before it"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
            f"<title>{title}</title><style>{_STYLE}</style>"
            f'<text x="{_LEFT}" y="22">{title} (both axes logarithmic)</text>'
            + "".join(parts)
            + f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">tokens before</text>'
            + "</svg>\n"
        )

    def _x(self, length: int) -> float:
        share = log10(length / self._first_length) / log10(self._last_length / self._first_length)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, seconds: float) -> float:
        share = (log10(seconds) - self._low) / (self._high - self._low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def _grid(self) -> str:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        lines = []
        for power in range(self._low, self._high + 1):
            y = self._y(10.0**power)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            lines.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{format_seconds(10.0**power)}</text>')
        for point in self._points:
            x = self._x(point["context_tokens"])
            lines.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
            lines.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{point["context_tokens"]:,}</text>')
        lines.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        return "".join(lines)

    def _series(self, name: str, label: str, css: str) -> str:
        places = [(self._x(point["context_tokens"]), self._y(point[name])) for point in self._points]
        path = " ".join(f"{x},{y}" for x, y in places)
        dots = "".join(
            f'<circle class="dot {css}" cx="{x}" cy="{y}" r="4"><title>{point["context_tokens"]:,} tokens: '
            f"{format_seconds(point[name])}</title></circle>"
            for (x, y), point in zip(places, self._points, strict=True)
        )
        x, y = places[-1]
        exponent = growth_exponent(self._document, name)
        grows = "" if exponent is None else f'<tspan x="{x + 10}" dy="16">length^{exponent:.2f}</tspan>'
        text = f'<text x="{x + 10}" y="{y + 4}">{label}{grows}</text>'
        return f'<polyline class="line {css}" points="{path}"/>{dots}{text}'
