"""What `octavo eval kv` shows on a terminal: the price list, the same by position, and the numbers that were found."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_variants(document: dict[str, Any]) -> None:
    """Write the tables of a document to stdout."""
    console = Console(highlight=False)
    variants = document["variants"]
    console.print(f"{document['model']}, {document['num_positions']:,} positions of one text")
    console.print("Divergence from f32 keys and values on the same weights, in nats\n")
    console.print(_prices(variants))
    for line in broken_lines(variants):
        console.print(line)
    console.print("\nKL mean, by position")
    console.print(_by_position(variants))
    if document["exact_passkeys"]:
        console.print("\nHidden numbers found again: near the beginning, in the middle, near the end of")
        console.print(_passkeys(document))
    if document["budget_kl"] is not None:
        console.print(f"\n{_recommendation(document)}")


def _prices(variants: list[dict[str, Any]]) -> Table:
    heads = ("KV cache", "B/token", "KL mean", "KL p99", "same top-1", "perplexity", "ratio", "tok/s")
    table = _table(heads)
    for variant in variants:
        table.add_row(
            variant["label"],
            f"{variant['bytes_per_token']:,}",
            format_kl(variant["kl_mean"]),
            format_kl(variant["kl_p99"]),
            f"{variant['top1_agreement_ratio']:.2%}",
            format_number(variant["perplexity"], ".3f"),
            format_number(variant["perplexity_ratio"], ".5f"),
            format_number(variant["decode_tokens_per_s"], ".0f"),
        )
    return table


def _by_position(variants: list[dict[str, Any]]) -> Table:
    heads = [f"{each['first_position']:,}-{each['last_position']:,}" for each in variants[0]["buckets"]]
    table = _table(("KV cache", *heads))
    for variant in variants:
        table.add_row(variant["label"], *(format_kl(each["kl_mean"]) for each in variant["buckets"]))
    return table


def _passkeys(document: dict[str, Any]) -> Table:
    lengths = sorted({each["length_tokens"] for each in document["exact_passkeys"]})
    table = _table(("KV cache", *(f"{length:,} tokens" for length in lengths)))
    for label, passkeys in passkey_rows(document):
        cells = []
        for length in lengths:
            found = [each["is_found"] for each in passkeys if each["length_tokens"] == length]
            cells.append(" ".join("yes" if each else "no" for each in found))
        table.add_row(label, *cells)
    return table


def passkey_rows(document: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return labels and what was found: first what the model finds with exact keys and values, then each variant."""
    rows = [(f"{document['compared_with']} (exact)", document["exact_passkeys"])]
    return rows + [(variant["label"], variant["passkeys"]) for variant in document["variants"]]


def _recommendation(document: dict[str, Any]) -> str:
    name, budget = document["recommended"], document["budget_kl"]
    if name is None:
        return f"No variant stays within a mean KL divergence of {budget:g}."
    return f"Smallest within a mean KL divergence of {budget:g}: {name}"


def broken_lines(variants: list[dict[str, Any]]) -> list[str]:
    """Say of each variant that has no number for its divergence why."""
    return [
        f"{variant['label']}: after some tokens the model says nothing (NaN): keys or values leave the dtype's range"
        for variant in variants
        if variant["kl_mean"] is None
    ]


def format_kl(value: float | None) -> str:
    """Return a divergence in nats with two or three digits; a dash where it is infinite."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value >= 0.001 else f"{value:.1e}" if value else "0"


def format_number(value: float | None, digits: str) -> str:
    """Return a number, or a dash for none."""
    return "-" if value is None else format(value, digits)


def _table(heads: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(head, justify="right")
    return table
