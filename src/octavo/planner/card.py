"""The start card as plain data: where the memory goes, what the pool holds, and why each open value is what it is.

The same card is printed when an engine starts and when one is planned; `cli/render.py` draws it. The parts add up to
the total exactly, and every number here is one that the engine uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.config.engine import OPTIONS
from octavo.config.resolved import ResolvedConfig
from octavo.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPart:
    """One piece of the memory bar."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLine:
    """One decided value: its option, the value with its unit, and why (`asked` when a person set it)."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What `octavo` shows before it runs.

    Args:
        parts: Weights, activations, overhead, KV pool and what stays free; they add up to `total_bytes`.
        resident_limit_bytes: What resident memory can grow to: all parts but the free one.
        max_concurrency: Requests of `max_model_len` tokens that the pool holds at once.
    """

    model: str
    parts: tuple[CardPart, ...]
    total_bytes: int
    resident_limit_bytes: int
    num_blocks: int
    block_size: int
    block_bytes: int
    pool_tokens: int
    max_model_len: int
    max_concurrency: float
    lines: tuple[CardLine, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values with their units in the names, for JSON."""
        return {
            "model": self.model,
            "memory": {f"{part.name.lower().replace(' ', '_')}_bytes": part.num_bytes for part in self.parts},
            "total_bytes": self.total_bytes,
            "resident_limit_bytes": self.resident_limit_bytes,
            "num_blocks": self.num_blocks,
            "block_size_tokens": self.block_size,
            "block_bytes": self.block_bytes,
            "pool_tokens": self.pool_tokens,
            "max_model_len_tokens": self.max_model_len,
            "max_concurrency_ratio": self.max_concurrency,
            "values": {line.name: {"value": line.value, "reason": line.reason} for line in self.lines},
        }


def make_card(resolved: ResolvedConfig) -> Card:
    """Lay out a resolved config for a person."""
    used = (
        CardPart(name="weights", num_bytes=resolved.weight_bytes),
        CardPart(name="activations", num_bytes=resolved.activation_bytes),
        CardPart(name="overhead", num_bytes=resolved.overhead_bytes),
        CardPart(name="KV pool", num_bytes=resolved.kv_pool_bytes),
    )
    used_bytes = sum(part.num_bytes for part in used)
    free_bytes = resolved.available_bytes - used_bytes
    assert free_bytes >= 0, "the planner let through what does not fit"
    return Card(
        model=resolved.model,
        parts=(*used, CardPart(name="free", num_bytes=free_bytes)),
        total_bytes=resolved.available_bytes,
        resident_limit_bytes=used_bytes,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        block_bytes=resolved.block_bytes,
        pool_tokens=resolved.pool_tokens,
        max_model_len=resolved.max_model_len,
        max_concurrency=resolved.max_concurrency,
        lines=tuple(_lines(resolved)),
    )


def _lines(resolved: ResolvedConfig) -> list[CardLine]:
    shown = {
        "weight_dtype": resolved.weight_dtype,
        "num_blocks": f"{resolved.num_blocks:,} of {format_bytes(resolved.block_bytes)}",
    }
    lines = []
    for option in OPTIONS:
        reason = resolved.reasons.get(option.name)
        if reason is None:
            continue  # asked for, or a plain default: nothing was decided
        value = getattr(resolved, option.name)
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else option.show(value)
        unit = "" if option.name in shown or not option.unit else f" {option.unit}"
        lines.append(CardLine(name=option.name, value=shown.get(option.name, text) + unit, reason=reason))
    return lines
