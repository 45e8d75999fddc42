"""Keys and values as they are stored: rounded to a float type, or as codes with one scale per row.

A row is one token's key or value of one head. What is stored depends on that row alone, so a copied, shared or resumed
block holds the bits that computing it again would give. A code stands for level x scale:

    int8        levels -127 .. 127      scale = largest magnitude / 127
    fp8_e4m3    the number / 256        scale = largest magnitude / 1.75         (448, the largest number, / 256)
    int4        16 x (-8 .. 7)          scale = number of largest magnitude / -128, of either sign

Scales are rounded away from zero to bf16: no number lies outside the levels, and a row of finite floats has a finite
scale. The numbers of a row are divided by the scale as stored and rounded to the nearest level, ties to even.

Rows that are not ordinary:

    all zero, or too small for a scale      scale 0, codes 0: reads as zeros
    NaN or infinity anywhere                scale NaN, codes 0: the row reads as NaN, no other row changes
    a huge outlier                          a large scale: the row's small numbers become zeros, no other row changes

Kernels write the same bits (`csrc/store_kernels.h`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import KVDtype

Float32 = NDArray[np.float32]
Stored = NDArray[np.generic]
Scales = NDArray[np.uint16]
"""bf16 as its 16 bits."""

STORED_AS: dict[KVDtype, type[np.generic]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "int8": np.int8,
    "fp8_e4m3": np.uint8,
    "int4": np.uint8,
}
"""Type of the numbers in a row; bf16 and fp8 as their bits, int4 in pairs of two in a byte."""

_NAN_SCALE = 0x7FC0
_E4M3_LOWEST_NORMAL = np.float32(2.0**-6)
_E4M3_LOWEST_STEP = np.float32(2.0**-9)


def encode(values: Float32, dtype: KVDtype) -> Stored:
    """Round to the nearest number of a float dtype, ties to even; bf16 as its 16 bits.

    A magnitude beyond float16's 65,504 becomes infinity, as the F16C instructions do it: a wrong number that shows,
    rather than one that hides.
    """
    if dtype == "f32":
        return values
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    assert dtype == "bf16", "quantised rows have scales: see quantise"
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    # Rounding could carry a NaN's bits into infinity or zero; keep it a (quiet) NaN.
    return np.where(np.isnan(values), bits >> 16 | np.uint32(0x40), rounded).astype(np.uint16)


def decode(stored: Stored, dtype: KVDtype) -> Float32:
    """Return the float32 numbers that stored ones of a float dtype stand for; exact."""
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def quantise(rows: Float32, dtype: KVDtype) -> tuple[Stored, Scales]:
    """Return codes and scales of the rows `rows[..., :]`.

    Returns:
        Codes `[..., row_code_bytes]`, int4 with number 2i in the lower half of byte i; scales `[...]`.
    """
    is_finite = np.isfinite(np.abs(rows).max(axis=-1))
    finite = np.where(is_finite[..., None], rows, np.float32(0))
    scales = _rounded_away(_exact_scales(finite, dtype))
    divisors = decode(scales, "bf16")
    has_scale = divisors != 0
    divisors[~has_scale] = 1
    numbers: Float32 = np.where(has_scale[..., None], finite, np.float32(0))  # -0 has a code of its own in e4m3
    with np.errstate(under="ignore"):
        quotients: Float32 = numbers / divisors[..., None]
    scales[~has_scale] = 0
    scales[~is_finite] = _NAN_SCALE
    return _codes(quotients, dtype), scales


def dequantise(codes: Stored, scales: Scales, dtype: KVDtype) -> Float32:
    """Return the numbers that rows of codes stand for, each product rounded to float32."""
    with np.errstate(invalid="ignore"):  # NaN scales
        return levels(codes, dtype) * decode(scales, "bf16")[..., None]


def levels(codes: Stored, dtype: KVDtype) -> Float32:
    """Return what codes stand for before their row's scale; exact."""
    if dtype == "int8":
        return codes.astype(np.float32)
    if dtype == "int4":
        packed = codes.view(np.uint8)
        pairs = np.stack([packed << np.uint8(4), packed & np.uint8(0xF0)], axis=-1)
        return pairs.view(np.int8).reshape(*codes.shape[:-1], -1).astype(np.float32)
    bits = codes.astype(np.uint16)
    halves = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).astype(np.uint16)
    return halves.view(np.float16).astype(np.float32)


def _exact_scales(rows: Float32, dtype: KVDtype) -> Float32:
    highest: Float32 = rows.max(axis=-1)
    lowest: Float32 = rows.min(axis=-1)
    with np.errstate(under="ignore"):
        if dtype == "int4":
            # Level -128 has no counterpart above zero: the scale takes the sign that brings the extreme there.
            extreme: Float32 = np.where(highest >= -lowest, highest, lowest)
            return extreme * np.float32(-1 / 128)
        magnitude: Float32 = np.maximum(highest, -lowest)
        quotient: Float32 = magnitude / np.float32(127 if dtype == "int8" else 1.75)
        return quotient


def _rounded_away(scales: Float32) -> Scales:
    """Return bf16 bits, magnitudes rounded up."""
    bits = np.ascontiguousarray(scales).view(np.uint32)
    return (bits + np.uint32(0xFFFF) >> np.uint32(16)).astype(np.uint16)


def _codes(quotients: Float32, dtype: KVDtype) -> Stored:
    if dtype == "int8":
        return np.rint(quotients).astype(np.int8)
    if dtype == "int4":
        whole = np.rint(np.minimum(quotients * np.float32(1 / 16), np.float32(7)))
        codes = whole.astype(np.int8).view(np.uint8)
        packed: NDArray[np.uint8] = codes[..., ::2] & np.uint8(0xF) | codes[..., 1::2] << np.uint8(4)
        return packed
    return _e4m3_codes(quotients * np.float32(256))


def _e4m3_codes(numbers: Float32) -> Stored:
    """Round to e4m3: 4 bits of exponent, 3 of mantissa; magnitudes are at most 448."""
    magnitude = np.abs(numbers)
    bits = magnitude.view(np.uint32)
    kept = bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1)) >> np.uint32(20)
    normal = kept - np.uint32(120 << 3)  # its exponent counts from 7, not from 127
    subnormal = np.rint(magnitude / _E4M3_LOWEST_STEP).astype(np.uint32)
    signs = np.signbit(numbers).astype(np.uint32) << np.uint32(7)
    codes: NDArray[np.uint8] = (np.where(magnitude < _E4M3_LOWEST_NORMAL, subnormal, normal) | signs).astype(np.uint8)
    return codes
