"""Curves: requests at once against their length, one curve for each way to hold keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.errors import CapacityError, InvalidParameterError
from octavo.planner.question import PlanQuestion
from octavo.planner.sizer import Sizer
from octavo.planner.sizing import Sizing

_DTYPES = ("f16", "bf16", "fp8", "int8", "int4")
_SHORTEST_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One KV dtype.

    Args:
        lengths: Tokens of a request, each twice the one before; the last is the model's limit.
        concurrency: Requests of each length at once.
    """

    kv_cache_dtype: str
    lengths: tuple[int, ...]
    concurrency: tuple[float, ...]


def find_curves(sizer: Sizer, question: PlanQuestion, base: Sizing) -> tuple[Curve, ...]:
    """Return the plan's own curve first, then those of the other dtypes that the engine has."""
    curves = [_curve(base)] if base.num_blocks else []
    for dtype in _DTYPES:
        if base.kv_dtype.startswith(dtype) or {dtype, base.kv_dtype} == {"f16", "bf16"}:
            continue
        try:
            sizing = sizer.size(replace(question, kv_cache_dtype=dtype))
        except (InvalidParameterError, CapacityError):
            continue
        curve = _curve(sizing)
        # Formats of the same bytes would draw the same line twice.
        if sizing.num_blocks and all(curve.concurrency != each.concurrency for each in curves):
            curves.append(curve)
    return tuple(curves)


def _curve(sizing: Sizing) -> Curve:
    lengths = []
    length = min(_SHORTEST_TOKENS, sizing.model_limit)
    while length < sizing.model_limit:
        lengths.append(length)
        length *= 2
    lengths.append(sizing.model_limit)
    return Curve(
        kv_cache_dtype=sizing.kv_dtype,
        lengths=tuple(lengths),
        concurrency=tuple(sizing.concurrency_of(each) for each in lengths),
    )
