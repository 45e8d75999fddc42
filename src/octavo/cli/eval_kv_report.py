"""`octavo eval kv --report`: table and charts as one HTML document.

Nothing is loaded from elsewhere; colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from octavo.cli.eval_kv_chart import STYLE as CHART_STYLE
from octavo.cli.eval_kv_chart import chart
from octavo.cli.eval_kv_view import broken_lines, format_kl, format_number, passkey_rows

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2rem auto; padding: 0 1rem;
  background: #fff; color: #1c1e21; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; } td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 1px solid #6b7280; font-weight: 600; } .wide { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #15171a; color: #e6e8eb; } }
"""


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
<style>{_STYLE}{CHART_STYLE}</style></head>
<body>
<h1>What a smaller KV cache costs</h1>
<p>{model}: {document["num_positions"]:,} positions of one text, against f32 keys and values on the same weights.
KL divergence in nats; 0 is no difference.</p>
{_prices(variants)}
{"".join(f"<p>{escape(line)}.</p>" for line in broken_lines(variants))}
{advice}
<h2>By position</h2>
<p>Where more is cached, more of it is rounded.</p>
{chart(variants)}
{_passkeys(document)}
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
            format_number(variant["perplexity_ratio"], ".5f"),
            format_number(variant["decode_tokens_per_s"], ".0f"),
        )
        for variant in variants
    ]
    return _table(heads, rows)


def _passkeys(document: dict[str, Any]) -> str:
    if not document["exact_passkeys"]:
        return ""
    places = [(each["length_tokens"], each["depth_ratio"]) for each in document["exact_passkeys"]]
    heads = ("KV cache", *(f"{length:,} at {depth:.0%}" for length, depth in places))
    rows = [
        (escape(label), *("yes" if each["is_found"] else "no" for each in passkeys))
        for label, passkeys in passkey_rows(document)
    ]
    return (
        "<h2>Hidden numbers found again</h2><p>Tokens of the text, and how deep in it. What exact keys and values do "
        f"not find, the model does not.</p>{_table(heads, rows)}"
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
