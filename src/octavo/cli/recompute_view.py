"""What `octavo bench recompute` shows on a terminal: a table, and bars of the time per token."""

from __future__ import annotations

from math import log
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_BAR_CELLS = 48
_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_points(document: dict[str, Any]) -> None:
    """Write table and chart of a document to stdout."""
    console = Console(highlight=False)
    console.print("A token after so many others; the sums are estimates for writing so many tokens.\n")
    console.print(_table(document))
    console.print()
    console.print(_chart(document))
    console.print()
    console.print(_conclusion(document))


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits in the unit that suits it."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def growth_exponent(document: dict[str, Any], name: str) -> float | None:
    """Return p where the field `name` grows like length^p between the first and the last point."""
    first, last = document["points"][0], document["points"][-1]
    if first["context_tokens"] == last["context_tokens"]:
        return None
    return log(last[name] / first[name]) / log(last["context_tokens"] / first["context_tokens"])


def _table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for head in ("tokens", "cached", "recomputed", "ratio", "sum cached", "sum recomputed"):
        table.add_column(head, justify="right")
    for point in document["points"]:
        table.add_row(
            f"{point['context_tokens']:,}",
            format_seconds(point["cached_s_per_token"]),
            format_seconds(point["recomputed_s_per_token"]),
            f"{point['recomputed_to_cached_ratio']:,.1f}x",
            format_seconds(point["cached_total_estimate_s"]),
            format_seconds(point["recomputed_total_estimate_s"]),
        )
    return table


def _chart(document: dict[str, Any]) -> Text:
    """Return two bars per length, all on one linear scale."""
    points = document["points"]
    longest_s = max(max(point["cached_s_per_token"], point["recomputed_s_per_token"]) for point in points)
    width = max(len(f"{point['context_tokens']:,}") for point in points)
    chart = Text("time per token\n")
    for point in points:
        chart.append(f"{point['context_tokens']:>{width},} ")
        chart.append("cached     ")
        chart.append(_bar(point["cached_s_per_token"] / longest_s), style="green")
        chart.append("\n" + " " * (width + 1) + "recomputed ")
        chart.append(_bar(point["recomputed_s_per_token"] / longest_s), style="red")
        chart.append("\n")
    chart.rstrip()
    return chart


def _bar(share: float) -> str:
    eighths = max(1, round(share * _BAR_CELLS * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _conclusion(document: dict[str, Any]) -> str:
    cached, recomputed = (growth_exponent(document, name) for name in ("cached_s_per_token", "recomputed_s_per_token"))
    equal = all(point["are_tokens_equal"] for point in document["points"])
    verdict = "Both ways chose the same tokens." if equal else "The two ways chose different tokens: that is a bug."
    if cached is None or recomputed is None:
        return verdict
    growth = f"Time per token grows like length^{cached:.2f} with the cache, like length^{recomputed:.2f} without."
    return f"{growth} {verdict}"
