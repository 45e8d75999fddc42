"""Reads the rotary scaling of a configuration: Hugging Face's two spellings, and GGUF's.

Hugging Face files say `rope_theta` and `rope_scaling` (older) or `rope_parameters` (newer); the kind is `rope_type` or
`type`. A kind, a field or a value that is not known here is refused: a wrong rotation reads as fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.rope import yarn_attention_factor
from octavo.models.spec import Rope, RopeKind

DEFAULT_THETA = 10_000.0
"""What every family here means when no base is given (Llama 2's files give none)."""

# Fields that each kind may have; `factor` 1 is harmless in an unscaled one.
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_HF_FIELDS: dict[str, tuple[RopeKind, frozenset[str]]] = {
    "default": ("default", frozenset({"factor"})),
    "linear": ("linear", frozenset({"factor"})),
    "longrope": (
        "longrope",
        frozenset({"factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"}),
    ),
    "llama3": (
        "llama3",
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    ),
    "yarn": (
        "yarn",
        frozenset(
            {
                *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
                *("beta_fast", "beta_slow", "truncate", "finetuned"),
            }
        ),
    ),
}


def rope_from_hf(
    config: Mapping[str, object], where: str, *, head_dim: int, max_position: int, may_be_partial: bool = False
) -> Rope:
    """Read the rotary fields of `config.json`.

    Args:
        may_be_partial: Whether `partial_rotary_factor` may leave a part of each head as it is, and `longrope` give each
            pair a divisor of its own (Phi-3).

    Raises:
        UnsupportedModelError: an unknown kind or field, or heads that are rotated only in part.
        ModelFileError: a field is missing or has an impossible value.
    """
    outer = Fields(config, where)
    spellings = [name for name in ("rope_parameters", "rope_scaling") if name in outer]
    rotary_dim = _rotary_dim(outer, spellings, head_dim) if may_be_partial else head_dim
    ropes = [
        _rope_from_field(outer, name, rotary_dim=rotary_dim, max_position=max_position, may_be_partial=may_be_partial)
        for name in spellings
    ]
    if not ropes:
        return Rope(theta=_theta(outer, outer), rotary_dim=rotary_dim)
    if any(rope != ropes[0] for rope in ropes):
        raise ModelFileError(f"{where}: rope_parameters and rope_scaling say different things")
    return ropes[0]


def _rotary_dim(outer: Fields, spellings: list[str], head_dim: int) -> int:
    """Return how many dimensions of a head are rotated; transformers cuts fractions off."""
    factor = outer.positive("partial_rotary_factor", 1.0)
    for name in spellings:
        factor = outer.inner(name).positive("partial_rotary_factor", factor)
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim % 2 or rotary_dim < 2:
        raise outer.error(
            "partial_rotary_factor", f"is {factor:g}, which rotates {rotary_dim} of {head_dim} dimensions"
        )
    return rotary_dim


def _rope_from_field(outer: Fields, name: str, *, rotary_dim: int, max_position: int, may_be_partial: bool) -> Rope:
    inner = outer.inner(name)
    kind_name = inner.text("rope_type", inner.text("type", "default"))
    _refuse_unknown(inner, kind_name, may_be_partial=may_be_partial)
    kind, _ = _HF_FIELDS[kind_name]
    theta = _theta(inner, outer)
    head_dim = rotary_dim  # what follows scales the part that is rotated
    if kind == "longrope":
        return _longrope(inner, outer, theta, rotary_dim, max_position)
    if kind == "default":
        return Rope(theta=theta, rotary_dim=head_dim)
    if kind == "linear":
        return Rope(theta=theta, rotary_dim=head_dim, kind=kind, factor=inner.positive("factor"))
    original = outer.whole(
        "original_max_position_embeddings", inner.whole("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        return _llama3(inner, theta, head_dim, original)
    return _yarn(inner, theta, head_dim, original, max_position)


def _llama3(inner: Fields, theta: float, head_dim: int, original: int) -> Rope:
    rope = Rope(
        theta=theta,
        rotary_dim=head_dim,
        kind="llama3",
        factor=inner.positive("factor"),
        original_max_position=original,
        low_freq_factor=inner.positive("low_freq_factor"),
        high_freq_factor=inner.positive("high_freq_factor"),
    )
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise inner.error("low_freq_factor", f"is {rope.low_freq_factor:g}, not below high_freq_factor")
    return rope


def _yarn(inner: Fields, theta: float, head_dim: int, original: int, max_position: int) -> Rope:
    factor = inner.positive("factor", max_position / original)
    # Both scalings or neither: one alone has no effect in the yardstick, transformers.
    mscale, mscale_all_dim = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    usual = yarn_attention_factor(factor)
    if mscale and mscale_all_dim:
        denominator = yarn_attention_factor(factor, mscale=mscale_all_dim)
        if denominator <= 0:
            raise inner.error("mscale_all_dim", f"is {mscale_all_dim:g}, which scales attention by nothing")
        usual = yarn_attention_factor(factor, mscale=mscale) / denominator
    beta_fast, beta_slow = inner.positive("beta_fast", 32.0), inner.positive("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise inner.error("beta_fast", f"is {beta_fast:g}, below beta_slow, {beta_slow:g}")
    return Rope(
        theta=theta,
        rotary_dim=head_dim,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=inner.flag("truncate", default=True),
        attention_factor=inner.positive("attention_factor", usual),
    )


def _longrope(inner: Fields, outer: Fields, theta: float, rotary_dim: int, max_position: int) -> Rope:
    """Read the factors for contexts up to the original length; those for longer ones are another rotation."""
    name = "original_max_position_embeddings"
    original = inner.whole(name, outer.whole(name, max_position))
    factors = inner.raw("short_factor")
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        raise inner.error("short_factor", f"is not a list of {rotary_dim // 2} numbers, one for each pair")
    pairs = Fields({str(pair): factor for pair, factor in enumerate(factors)}, inner.where, parent="short_factor.")
    stretch = max_position / original
    usual = 1.0 if stretch <= 1 else (1 + math.log(stretch) / math.log(original)) ** 0.5
    return Rope(
        theta=theta,
        rotary_dim=rotary_dim,
        kind="longrope",
        original_max_position=original,
        attention_factor=inner.positive("attention_factor", usual),
        freq_factors=tuple(pairs.positive(str(pair)) for pair in range(len(factors))),
    )


def _refuse_unknown(inner: Fields, kind_name: str, *, may_be_partial: bool) -> None:
    known = [name for name in _HF_FIELDS if name != "longrope" or may_be_partial]
    if kind_name not in known or ("type" in inner and inner.text("type") != kind_name):
        field = "rope_type" if "rope_type" in inner and kind_name not in known else "type"
        raise UnsupportedModelError(
            f"{inner.describe(field)}, a rotary scaling that is not implemented",
            because=f"the known ones are {', '.join(known)}",
        )
    _, allowed = _HF_FIELDS[kind_name]
    for name in inner.names:
        if name not in _COMMON | allowed:
            raise UnsupportedModelError(f"{inner.describe(name)}, a field that {kind_name} scaling does not have here")
    if not may_be_partial and inner.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{inner.describe('partial_rotary_factor')}; only whole heads are rotated here")
    if kind_name == "default" and inner.number("factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{inner.describe('factor')}, but default scaling has no factor")


def _theta(inner: Fields, outer: Fields) -> float:
    theta = inner.positive("rope_theta", outer.positive("rope_theta", DEFAULT_THETA))
    if theta <= 1:
        raise outer.error("rope_theta", f"is {theta:g}, a base above 1 was expected")
    return theta


def rope_from_gguf(fields: Fields, *, head_dim: int, max_position: int, freq_factors: tuple[float, ...]) -> Rope:
    """Read the rotary metadata of a GGUF file; `fields` are those of the architecture, without its prefix.

    Args:
        freq_factors: The tensor `rope_freqs.weight`, empty where the file has none.

    Raises:
        UnsupportedModelError: an unknown kind, or an adjustment that is not implemented.
        ModelFileError: a field is missing or has an impossible value.
    """
    if fields.whole("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{fields.describe('rope.dimension_count')}, but heads have {head_dim} dimensions; "
            "only whole heads are rotated here"
        )
    theta = fields.positive("rope.freq_base", DEFAULT_THETA)
    if theta <= 1:
        raise fields.error("rope.freq_base", f"is {theta:g}, a base above 1 was expected")
    _refuse_adjustments(fields)
    # Files from before the scaling fields had one factor, and a factor without a kind meant linear.
    factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    kind = fields.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return Rope(theta=theta, rotary_dim=head_dim, freq_factors=freq_factors)
    if kind == "linear":
        return Rope(theta=theta, rotary_dim=head_dim, kind="linear", factor=factor, freq_factors=freq_factors)
    if kind == "yarn":
        return Rope(
            theta=theta,
            rotary_dim=head_dim,
            kind="yarn",
            factor=factor,
            original_max_position=fields.whole("rope.scaling.original_context_length", max_position),
            beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=yarn_attention_factor(factor),
            freq_factors=freq_factors,
        )
    raise UnsupportedModelError(
        f"{fields.describe('rope.scaling.type')}, a rotary scaling that is not implemented",
        because="the known ones are none, linear, yarn and a rope_freqs tensor",
    )


def _refuse_adjustments(fields: Fields) -> None:
    """Refuse what tools disagree about: extra factors on yarn's attention scaling and blending."""
    neutral = {
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0,
        "rope.scaling.alpha": 0.0,
    }
    for name, value in neutral.items():
        if fields.number(name, value) != value:
            raise UnsupportedModelError(f"{fields.describe(name)}, an adjustment that is not implemented")
