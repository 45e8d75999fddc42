"""What the native matrix products compute, in NumPy and to the bit.

The specification of `csrc/linear*.cpp`: slow, and sure. Tests and the self-test compare kernels with it for equality.

    float kinds     sum = fma(x[k], w[k], sum)                                     k ascending
    others          sum = fma(value[g], s[g], sum)                                 groups of 32 ascending
        q8_0        value = dot * scale
        q4_*        value = fma(dot, scale, total * minimum)                       a weight is scale * q + minimum
        q6_k        value = fma(dot_1, scale_1, dot_0 * scale_0)                   two sub-blocks of 16

`s` and the int8 numbers come from `quantise_rows`; `dot` and `total` (the sum of a row's numbers) are exact integers.
Portable kernels round the product and the sum of an fma separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.models.tensor_kinds import TensorKind
from octavo.models.weights_decode import decode_f32

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
MultiplyAdd = Callable[[Float32, Float32, Float32], Float32]

GROUP_INPUTS = 32
FLOAT_KINDS = frozenset({"f32", "f16", "bf16"})

_TINY = np.float32(2.0**-120)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedWeights:
    """Quantised weights as numbers and scales; a weight is `scales[sub_block] * numbers + minima`.

    Args:
        numbers: `[rows, groups, 32]`.
        scales: `[rows, groups, sub_blocks]`; one sub-block, or two for q6_k.
        minima: `[rows, groups]`, or `None`.
    """

    numbers: Int32
    scales: Float32
    minima: Float32 | None


def linear(x: Float32, weights: Bytes, kind: TensorKind, *, is_fused: bool) -> Float32:
    """Return `x @ weights.T`, `[num_rows, num_outputs]`, with the bits of the native kernels.

    Args:
        x: `[num_rows, num_inputs]`.
        weights: Rows as stored, `[num_outputs, row_bytes]`.
        kind: Kind of the weights, one that the kernels hold.
        is_fused: Whether multiply and add are rounded once (AVX2) or twice (portable).
    """
    multiply_add = fused_multiply_add if is_fused else _multiply_then_add
    total = np.zeros((len(x), len(weights)), np.float32)
    if kind in FLOAT_KINDS:
        values = decode_f32(weights, kind, x.shape[1])
        for k in range(x.shape[1]):
            total = multiply_add(x[:, k, None], values[None, :, k], total)
        return total
    numbers, scales = quantise_rows(x)
    grouped = grouped_weights(weights, kind)
    for group in range(numbers.shape[1]):
        value = _group_value(numbers[:, group], grouped, group, multiply_add)
        total = multiply_add(value, scales[:, group, None], total)
    return total


def quantise_rows(x: Float32) -> tuple[Int32, Float32]:
    """Quantise `[num_rows, num_inputs]` per row and group of 32: numbers `[num_rows, groups, 32]` and their scales.

    `s = max|x| / 127`, `q = round(x * (127 / max|x|))`, ties to even. Groups below 2^-120 count as zero; a group with
    a NaN or an infinity has scale NaN and numbers 0.
    """
    groups = x.reshape(len(x), -1, GROUP_INPUTS)
    greatest = np.abs(groups).max(axis=-1)  # NaN if there is one
    is_finite = np.isfinite(greatest)
    is_used = is_finite & (greatest >= _TINY)
    divisor = np.where(is_used, greatest, np.float32(1))
    inverse = np.where(is_used, np.float32(127) / divisor, np.float32(0))
    scales = np.where(is_used, divisor / np.float32(127), np.float32(0))
    scaled = np.where(is_finite[..., None], groups, np.float32(0)) * inverse[..., None]
    return np.rint(scaled).astype(np.int32), np.where(is_finite, scales, np.float32(np.nan))


def grouped_weights(rows: Bytes, kind: TensorKind) -> GroupedWeights:
    """Take stored rows `[num_rows, row_bytes]` apart."""
    return _TAKE_APART[kind](rows)


def fused_multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return `a * b + c`, rounded once.

    The product of two float32 is exact in float64. Their sum is rounded to odd there: a last bit of 1 marks what was
    cut off, so that rounding on to float32 cannot mistake it for a tie.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = c.astype(np.float64)
        rounded = product + addend
        share = rounded - product
        error = (product - (rounded - share)) + (addend - share)
        bits = np.ascontiguousarray(rounded).view(np.int64)
        to_odd = np.isfinite(rounded) & (error != 0) & (bits & 1 == 0)
        step = np.where((error > 0) == (rounded > 0), 1, -1)
        odd: Float64 = np.where(to_odd, bits + step, bits).view(np.float64)
        return odd.astype(np.float32)


def _multiply_then_add(a: Float32, b: Float32, c: Float32) -> Float32:
    with np.errstate(invalid="ignore", over="ignore"):
        return a * b + c


def _group_value(numbers: Int32, weights: GroupedWeights, group: int, multiply_add: MultiplyAdd) -> Float32:
    """Return `[num_rows, num_outputs]`: what a group adds, in units of the row's scale."""
    num_sub_blocks = weights.scales.shape[-1]
    size = GROUP_INPUTS // num_sub_blocks
    value: Float32 | None = None
    if weights.minima is not None:
        totals = numbers.sum(axis=-1).astype(np.float32)
        value = totals[:, None] * weights.minima[None, :, group]
    for index in range(num_sub_blocks):
        inputs = slice(index * size, (index + 1) * size)
        dot = (numbers[:, inputs] @ weights.numbers[:, group, inputs].T).astype(np.float32)
        scale = weights.scales[None, :, group, index]
        value = dot * scale if value is None else multiply_add(dot, scale, value)
    assert value is not None, "a group has sub-blocks"
    return value


def _blocks(rows: Bytes, block_bytes: int) -> Bytes:
    return rows.reshape(len(rows), -1, block_bytes)


def _halves(blocks: Bytes) -> Float32:
    """Return the half floats in the last axis."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _nibbles(blocks: Bytes) -> Int32:
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(np.int32)


def _q8_0(rows: Bytes) -> GroupedWeights:
    blocks = _blocks(rows, 34)
    numbers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.int32)
    return GroupedWeights(numbers=numbers, scales=_halves(blocks[..., :2]), minima=None)


def _q4_0(rows: Bytes) -> GroupedWeights:
    blocks = _blocks(rows, 18)
    scales = _halves(blocks[..., :2])
    return GroupedWeights(numbers=_nibbles(blocks[..., 2:]), scales=scales, minima=np.float32(-8) * scales[..., 0])


def _q4_1(rows: Bytes) -> GroupedWeights:
    blocks = _blocks(rows, 20)
    return GroupedWeights(
        numbers=_nibbles(blocks[..., 4:]), scales=_halves(blocks[..., :2]), minima=_halves(blocks[..., 2:4])[..., 0]
    )


def _q4_k(rows: Bytes) -> GroupedWeights:
    """A super-block has d and dmin, twelve bytes of 6-bit scales and minima, and 8 groups, two to 32 bytes."""
    blocks = _blocks(rows, 144)
    packed = blocks[..., 4:16].astype(np.int32)
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=-1)
    d, d_min = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    codes = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    numbers = np.stack([codes & 15, codes >> 4], axis=3)
    return GroupedWeights(
        numbers=numbers.reshape(len(rows), -1, 32).astype(np.int32),
        scales=(d * scales.astype(np.float32)).reshape(len(rows), -1, 1),
        minima=-(d_min * minima.astype(np.float32)).reshape(len(rows), -1),
    )


def _q6_k(rows: Bytes) -> GroupedWeights:
    """A super-block has two halves of 128 values with 64 bytes of nibbles and 32 bytes of two-bit fields each."""
    blocks = _blocks(rows, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=3).reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
    numbers = (low | high << 4).astype(np.int32) - 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return GroupedWeights(
        numbers=numbers.reshape(len(rows), -1, 32),
        scales=(_halves(blocks[..., 208:]) * scales).reshape(len(rows), -1, 2),
        minima=None,
    )


_TAKE_APART: dict[TensorKind, Callable[[Bytes], GroupedWeights]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
}
