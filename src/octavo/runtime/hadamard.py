"""The Hadamard transform that keys, values and queries take before they meet an int4 cache.

Each output is a sum of all numbers of its block with signs, so an outlier is spread over the block and the few levels
of four bits serve all numbers alike. Blocks are as long as the largest power of two that divides the head width.

    keys and values   H x                 stored; their scale takes the factor that H has
    queries           H q / block         so that (H q / block) . (H k) = q . k
    attended          H out / block       undoes H on the values

Only adds, subtracts and a division by a power of two, in a written-down order: kernels give the same bits
(`csrc/hadamard.h`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import KVDtype

Float32 = NDArray[np.float32]


def is_transformed(dtype: KVDtype) -> bool:
    """Return whether queries, keys and values are transformed before they meet this dtype."""
    return dtype == "int4"


def hadamard_block(head_dim: int) -> int:
    """Return the largest power of two that divides the width."""
    return head_dim & -head_dim


def hadamard(x: Float32) -> Float32:
    """Transform the vectors `x[..., :]`, unnormalised: twice gives `hadamard_block` times the vectors."""
    out = np.ascontiguousarray(x)
    half = 1
    with np.errstate(over="ignore", invalid="ignore"):  # inf - inf: the row is lost, as it should
        while half < hadamard_block(x.shape[-1]):
            pairs = out.reshape(*x.shape[:-1], -1, 2, half)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            out = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
            half *= 2
    return out


def hadamard_inverse(x: Float32) -> Float32:
    """Undo `hadamard`; also what a query takes."""
    return hadamard(x) * np.float32(1 / hadamard_block(x.shape[-1]))
