"""Which tiles of keys a query reads, in NumPy: the definition that `models/sparse.py` describes in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.sparse import TILE_TOKENS

Float32 = NDArray[np.float32]


def tile_bounds(keys: Float32) -> tuple[Float32, Float32]:
    """Return least and greatest of the keys `[num_kv_heads, context_length, head_dim]` of each whole tile.

    Two arrays `[num_kv_heads, num_whole_tiles, head_dim]`, rounded outward to bf16. NaN counts for nothing.
    """
    num_kv_heads, context_length, head_dim = keys.shape
    num_tiles = context_length // TILE_TOKENS
    tiles = keys[:, : num_tiles * TILE_TOKENS].reshape(num_kv_heads, num_tiles, TILE_TOKENS, head_dim)
    lows = np.where(np.isnan(tiles), np.float32(np.inf), tiles).min(axis=2)
    highs = np.where(np.isnan(tiles), np.float32(-np.inf), tiles).max(axis=2)
    return _outward(lows, is_up=False), _outward(highs, is_up=True)


def chosen_tiles(
    queries: Float32, lows: Float32, highs: Float32, positions: NDArray[np.int64], num_chosen: int
) -> NDArray[np.bool_]:
    """Return `[num_rows, num_heads, num_tiles]`: which tiles each row reads, up to the last row's own.

    Args:
        queries: `[num_rows, num_heads, head_dim]`.
        lows, highs: Of the tiles before the last row's own, `[num_kv_heads, num_tiles, head_dim]`.
        positions: Of the rows.
    """
    num_rows, num_heads, _ = queries.shape
    group = num_heads // len(lows)
    num_tiles = int(positions.max()) // TILE_TOKENS + 1
    chosen = np.zeros((num_rows, num_heads, num_tiles), np.bool_)
    for row, position in enumerate(positions.tolist()):
        own = position // TILE_TOKENS
        for head in range(num_heads):
            if own + 1 <= num_chosen:
                chosen[row, head, : own + 1] = True
                continue
            query, kv_head = queries[row, head], head // group
            bounds = np.where(query >= 0, query * highs[kv_head, :own], query * lows[kv_head, :own]).sum(axis=1)
            bounds = np.where(np.isnan(bounds), np.float32(np.inf), bounds)
            others = 1 + np.argsort(-bounds[1:], kind="stable")[: num_chosen - 2]
            chosen[row, head, [0, own, *others]] = True
    return chosen


def _outward(values: Float32, *, is_up: bool) -> Float32:
    """Round to bf16, away from the inside of the interval."""
    bits = values.view(np.uint32)
    truncated = bits & np.uint32(0xFFFF0000)
    is_inexact = (bits & np.uint32(0xFFFF)) != 0
    is_negative = (bits >> np.uint32(31)) != 0
    # Cutting bits off goes toward zero; away from it is one step on.
    away = is_inexact & (is_negative != is_up) & np.isfinite(values)
    rounded: Float32 = np.where(away, truncated + np.uint32(0x10000), truncated).view(np.float32)
    return rounded
