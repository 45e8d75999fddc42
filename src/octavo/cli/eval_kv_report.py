"""`octavo eval kv --report`: table and charts as one HTML document.

Nothing is loaded from elsewhere; colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

from octavo.cli.eval_kv_view import format_kl

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 110, 30, 56
_FLOOR = 1e-8
"""Smaller divergences are drawn here: the axis is logarithmic."""
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2rem auto; padding: 0 1rem;
  background: #fff; color: #1c1e21; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; } td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 1px solid #6b7280; font-weight: 600; } svg { width: 100%; height: auto; font: 13px system-ui; }
svg text { fill: #1c1e21; } .grid { stroke: #d8dbe0; } .axis { stroke: #6b7280; }
.line { fill: none; stroke-width: 2.5; }
.c0 { stroke: #2563eb; } .c1 { stroke: #0f8a4b; } .c2 { stroke: #c2410c; } .c3 { stroke: #7c3aed; }
.c4 { stroke: #b45309; }
.dot { stroke: none; } .dot.c0 { fill: #2563eb; } .dot.c1 { fill: #0f8a4b; } .dot.c2 { fill: #c2410c; }
.dot.c3 { fill: #7c3aed; } .dot.c4 { fill: #b45309; }
@media (prefers-color-scheme: dark) {
  body { background: #15171a; color: #e6e8eb; } svg text { fill: #e6e8eb; } .grid { stroke: #3a3f47; }
  .c0 { stroke: #60a5fa; } .c1 { stroke: #4ade80; } .c2 { stroke: #fb923c; } .c3 { stroke: #a78bfa; }
  .c4 { stroke: #fbbf24; }
  .dot.c0 { fill: #60a5fa; } .dot.c1 { fill: #4ade80; } .dot.c2 { fill: #fb923c; } .dot.c3 { fill: #a78bfa; }
  .dot.c4 { fill: #fbbf24; }
}
"""
_NUM_COLOURS = 5


def html_report(document: dict[str, Any]) -> str:
    """Return a whole document: what was measured, the price list, divergence by position, hidden numbers."""
    variants = document["variants"]
    model = escape(str(document["model"]))
    recommended = document["recommended"]
    advice = ""
    if document["budget_kl"] is not None:
        answer = f"<strong>{escape(recommended)}</strong>" if recommended else "none of them"
        advice = f"<p>Smallest variant within a mean KL divergence of {document['budget_kl']:g}: {answer}.</p>"
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>What a smaller KV cache costs: {model}</title>
<style>{_STYLE}</style></head>
<body>
<h1>What a smaller KV cache costs</h1>
<p>{model}: {document["num_positions"]:,} positions of one text, against f32 keys and values on the same weights.
KL divergence in nats; 0 is no difference.</p>
{_prices(variants)}
{advice}
<h2>By position</h2>
<p>Where more is cached, more of it is rounded.</p>
{_chart(variants)}
{_passkeys(variants)}
</body>
</html>
"""


def _prices(variants: list[dict[str, Any]]) -> str:
    heads = ("KV cache", "bytes a token", "KL mean", "KL p99", "same likeliest token", "perplexity ratio", "tokens/s")
    rows = [
        (
            escape(variant["label"]),
            f"{variant['bytes_per_token']:,}",
            format_kl(variant["kl_mean"]),
            format_kl(variant["kl_p99"]),
            f"{variant['top1_agreement_ratio']:.2%}",
            f"{variant['perplexity_ratio']:.5f}",
            f"{variant['decode_tokens_per_s']:.0f}",
        )
        for variant in variants
    ]
    return _table(heads, rows)


def _passkeys(variants: list[dict[str, Any]]) -> str:
    if not any(variant["passkeys"] for variant in variants):
        return ""
    places = [(each["length_tokens"], each["depth_ratio"]) for each in variants[0]["passkeys"]]
    heads = ("KV cache", *(f"{length:,} at {depth:.0%}" for length, depth in places))
    rows = [
        (escape(variant["label"]), *("yes" if each["is_found"] else "no" for each in variant["passkeys"]))
        for variant in variants
    ]
    return f"<h2>Hidden numbers found again</h2><p>Tokens of the text, and how deep in it.</p>{_table(heads, rows)}"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _chart(variants: list[dict[str, Any]]) -> str:
    """Draw the mean divergence of each bucket at its middle position, on a logarithmic axis."""
    values = [max(each["kl_mean"], _FLOOR) for variant in variants for each in variant["buckets"]]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high += low == high
    last: int = variants[0]["buckets"][-1]["last_position"]

    def x(position: float) -> float:
        return round(_LEFT + position / last * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share: float = (log10(max(value, _FLOOR)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - int(share * (_HEIGHT - _TOP - _BOTTOM))

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">1e{power}</text>')
    for each in variants[0]["buckets"]:
        at = x((each["first_position"] + each["last_position"]) / 2)
        label = f"{each['first_position']:,}-{each['last_position']:,}"
        parts.append(f'<text x="{at}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for number, variant in enumerate(variants):
        colour = f"c{number % _NUM_COLOURS}"
        places = [
            (x((each["first_position"] + each["last_position"]) / 2), y(each["kl_mean"])) for each in variant["buckets"]
        ]
        path = " ".join(f"{left},{top}" for left, top in places)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        parts += [f'<circle class="dot {colour}" cx="{left}" cy="{top}" r="4"/>' for left, top in places]
        left, top = places[-1]
        parts.append(f'<text x="{left + 12}" y="{top + 4}">{escape(variant["label"])}</text>')
    title = "Mean KL divergence, by position"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
        f"<title>{title}</title>{''.join(parts)}"
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">position in the text</text></svg>'
    )
