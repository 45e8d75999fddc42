"""The element-wise and per-row ops of `models/program.py` in NumPy: what each op means, in as few lines as it takes.

Every function works on each row by itself, so a row's bits cannot depend on its neighbours. That holds in NumPy for
IEEE arithmetic and for `exp` (the same instructions for the body and the tail of an array), and for sums along the
contiguous last axis (pairwise over the row, whatever the number of rows); tests pin all of it. Matrix products are in
`row_matmul.py`, attention in `reference_attention.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.spec import ActivationKind

Float32 = NDArray[np.float32]

_TWO_ROOT_TWO_OVER_PI = 1.5957691216057308


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


def layer_norm(x: Float32, weight: Float32, bias: Float32, eps: float) -> Float32:
    """Bring each row to mean 0 and variance 1, then multiply by `weight` and add `bias`, both `[width]`."""
    width = np.float32(x.shape[-1])
    total: Float32 = np.add.reduce(x, axis=-1, keepdims=True)
    centred: Float32 = x - total / width
    square_sum: Float32 = np.add.reduce(centred * centred, axis=-1, keepdims=True)
    normed: Float32 = centred / np.sqrt(square_sum / width + np.float32(eps)) * weight + bias
    return normed


def activate(x: Float32, kind: ActivationKind, *, has_gate: bool, num_parts: int) -> Float32:
    """Apply silu or gelu_tanh to each of `num_parts` parts of a row; see `program.Activate`."""
    parts = x.reshape(len(x), num_parts, -1)
    gate, up = np.split(parts, 2, axis=-1) if has_gate else (parts, None)
    # exp(-y) of a hugely negative y is infinite, which gives the right limit, -0.
    with np.errstate(over="ignore"):
        activated: Float32 = gate / (1 + np.exp(-_gelu_argument(gate) if kind == "gelu_tanh" else -gate))
    return (activated if up is None else activated * up).reshape(len(x), -1)


def _gelu_argument(x: Float32) -> Float32:
    """GELU's tanh form is x times a sigmoid: `0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u))`."""
    argument: Float32 = np.float32(_TWO_ROOT_TWO_OVER_PI) * (x + np.float32(0.044715) * (x * x * x))
    return argument


def soft_cap(x: Float32, cap: float) -> Float32:
    """Return `cap * tanh(x / cap)`."""
    capped: Float32 = np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


def route(scores: Float32, *, num_active: int, is_normalised: bool) -> Float32:
    """Return `ids | weights`, `[rows, 2 * num_active]`; see `program.Route`."""
    ids = np.argsort(-scores, axis=-1, kind="stable")[:, :num_active]
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = np.take_along_axis(shares, ids, axis=-1)
    total = np.zeros((len(scores), 1), np.float32)
    # Summed from left to right, as every runner does.
    for part in (weights if is_normalised else shares).T:
        total[:, 0] += part
    return np.concatenate([ids.astype(np.float32), weights / total], axis=-1)
