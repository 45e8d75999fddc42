"""Rotary frequencies: how fast each pair of dimensions turns, and how much the rotated values are scaled.

Doubles from the standard library only: every runner takes its angles from here, so that all agree to the bit.

    angle(position, i) = position * inverse_frequencies(rope)[i]
    cos, sin           = cos(angle) * attention_scaling(rope), sin(angle) * attention_scaling(rope)
"""

from __future__ import annotations

import math

from octavo.models.spec import Rope


def inverse_frequencies(rope: Rope) -> tuple[float, ...]:
    """Return radians per position for each of the `rotary_dim / 2` pairs, fastest first.

    Unscaled, pair i turns `theta ** (-2 i / rotary_dim)` radians per token. `freq_factors` divide that first, then
    the scaled kinds slow some or all pairs down by `factor`:

    - linear: all of them.
    - llama3: those that turn less than `low_freq_factor` times in the original context; none that turn more than
      `high_freq_factor` times; in between a blend, linear in the number of turns.
    - yarn: those that turn less than `beta_slow` times; none that turn more than `beta_fast` times; in between a
      blend, linear in the pair's index.
    - longrope: as `freq_factors` say.

    Source: Hugging Face transformers' rope initialisers (modeling_rope_utils), which compute in float32.
    """
    assert rope.rotary_dim > 0 and rope.rotary_dim % 2 == 0, "a rotary width is even"
    if rope.kind == "none":
        return (0.0,) * (rope.rotary_dim // 2)
    plain = [rope.theta ** (-index / rope.rotary_dim) for index in range(0, rope.rotary_dim, 2)]
    if rope.freq_factors:
        assert len(rope.freq_factors) == len(plain), "one divisor per pair"
        plain = [frequency / divisor for frequency, divisor in zip(plain, rope.freq_factors, strict=True)]
    match rope.kind:
        case "linear":
            return tuple(frequency / rope.factor for frequency in plain)
        case "llama3":
            return tuple(_llama3(frequency, rope) for frequency in plain)
        case "yarn":
            low, high = _yarn_range(rope)
            return tuple(_yarn(frequency, pair, low, high, rope) for pair, frequency in enumerate(plain))
        case "default" | "longrope":
            return tuple(plain)


def attention_scaling(rope: Rope) -> float:
    """Return the factor on cosines and sines: 1 but for kinds that sharpen attention over long contexts."""
    return rope.attention_factor if rope.kind in ("yarn", "longrope") else 1.0


def yarn_attention_factor(factor: float, *, mscale: float = 1.0) -> float:
    """Return yarn's usual scaling for a context stretched `factor` times: 1 + 0.1 mscale ln(factor)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequency: float, rope: Rope) -> float:
    turns = rope.original_max_position * frequency / (2 * math.pi)
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - kept) * frequency / rope.factor + kept * frequency


def _yarn_range(rope: Rope) -> tuple[float, float]:
    """Return the pair indices between which yarn blends."""

    def pair_turning(num_turns: float) -> float:
        """Return the (fractional) pair that turns so often in the original context."""
        turns_at_1_radian = rope.original_max_position / (2 * math.pi)
        return rope.rotary_dim * math.log(turns_at_1_radian / num_turns) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    return (low, high + 0.001) if low == high else (low, high)


def _yarn(frequency: float, pair: int, low: float, high: float, rope: Rope) -> float:
    slowed = min(1.0, max(0.0, (pair - low) / (high - low)))
    return frequency / rope.factor * slowed + frequency * (1 - slowed)
