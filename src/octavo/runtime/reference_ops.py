"""The element-wise and per-row ops of `models/program.py` in NumPy: what each op means, in as few lines as it takes.

Every function works on each row by itself, so a row's bits cannot depend on its neighbours. That holds in NumPy for
IEEE arithmetic and for `exp` (the same instructions for the body and the tail of an array), and for sums along the
contiguous last axis (pairwise over the row, whatever the number of rows); tests pin all of it. Matrix products are in
`row_matmul.py`, attention in `reference_attention.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


def embed(token_ids: NDArray[np.int32], weight: Float32, scale: float) -> Float32:
    """Look up rows of `[vocab_size, hidden_size]`."""
    return weight[token_ids] * np.float32(scale)


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """Divide each vector `x[..., :]` by its root mean square, then multiply by `weight` `[width]`."""
    square_sum: Float32 = np.add.reduce(x * x, axis=-1, keepdims=True)
    normed: Float32 = x / np.sqrt(square_sum / np.float32(x.shape[-1]) + np.float32(eps)) * weight
    return normed


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate heads by position: dimension i turns with dimension `i + rotary_dim / 2`, the rest stays.

    Args:
        x: `[num_tokens, num_heads, head_dim]`.
        cos, sin: `[num_tokens, rotary_dim / 2]`.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def gated_silu(gate_up: Float32) -> Float32:
    """Return `silu(gate) * up` for rows `gate | up`; `silu(x) = x / (1 + exp(-x))`."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        silu: Float32 = gate / (1 + np.exp(-gate))
    return silu * up
