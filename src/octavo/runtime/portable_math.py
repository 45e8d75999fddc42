"""Exponential and sum in float64 that any language repeats to the bit: adds and multiplies in a written-down order.

The sampler is built on these, so that a C++ sampler (compiled without contraction to FMA) draws the same tokens and
reports the same log-probabilities from the same logits, and so that no result depends on how NumPy was vectorised.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

LOWEST_EXPONENT = -708.0
"""Below this `portable_exp` is 0; above, its result is a normal number, so that 2^k can be made from bits."""

NUM_LANES = 16

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 21 zero bits at its end, so that its product with any exponent is exact.
_LN_2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN_2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# 1/13! ... 1/0!: the first term left out is below 2^-57 of the result for |r| <= ln(2) / 2.
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))


def portable_exp(x: Float64) -> Float64:
    """Return e^x for x <= 0 (`-inf` included), within 2 units in the last place.

    k = rint(x * log2(e)), ties to even;  r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    p = 1/13!, then p = p * r + 1/n! for n = 12 .. 0, each product and each sum rounded;  result p * 2^k
    """
    clipped = np.maximum(x, LOWEST_EXPONENT)
    k = np.rint(clipped * _LOG2_E)
    r = (clipped - k * _LN_2_HIGH) - k * _LN_2_LOW
    p = np.full_like(r, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        p *= r
        p += coefficient
    p *= ((k.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(x < LOWEST_EXPONENT, 0.0, p)


def lane_sum(values: Float64) -> float:
    """Sum in 16 lanes: lane i adds values i, i + 16, i + 32 ... in order; then lane 0 + lane 1 + ... + lane 15.

    Lanes let a vectorised loop keep up; the order is the same for any vector width that divides 16.
    """
    padded = np.zeros((-(-len(values) // NUM_LANES), NUM_LANES))
    padded.reshape(-1)[: len(values)] = values
    # accumulate, not reduce: reduce may add pairwise.
    lanes = np.add.accumulate(padded, axis=0)[-1] if len(values) else np.zeros(NUM_LANES)
    total = 0.0
    for lane in lanes.tolist():
        total += lane
    return total
