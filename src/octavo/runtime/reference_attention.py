"""Causal attention over cached keys and values, with bits that depend only on a row's own tokens.

    keys      0 ......... 63 | 64 ........ 127 | 128 ...        tiles at fixed absolute positions
    scores    one product per (query tile, key tile), always of the same shape
    softmax   maximum over all visible keys (exact in any order), exp; masked lanes selected away
    sums      within a tile in one fixed order, then tile after tile from the left

Nothing in this depends on the block size, on where a chunk starts, or on other rows: a tile a row sees nothing of adds
exactly zero. Masked lanes are replaced, never multiplied by zero, so whatever lies in a freed block (NaN, in tests)
cannot get out.

The maximum is taken first, over all tiles, where a kernel would fold it in and rescale ("online softmax"): the same
numbers up to rounding, with less to read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.sparse import TILE_TOKENS as SPARSE_TILE_TOKENS
from octavo.runtime.reference_ops import soft_cap
from octavo.runtime.row_matmul import RowArithmetic, Shape
from octavo.runtime.sparse_tiles import chosen_tiles, tile_bounds
from octavo.units import cdiv

Float32 = NDArray[np.float32]

TILE_TOKENS = 64
# Scores held at a time (1 MiB, to stay in the cache); more query tiles are done in turns.
_MAX_SCORES = 2**18


def attention_shapes(head_dim: int) -> list[Shape]:
    """Return the shapes of the products of attention, for `choose_row_arithmetic`."""
    return [(TILE_TOKENS, head_dim), (head_dim, TILE_TOKENS)]


def attend(
    queries: Float32,
    keys: Float32,
    values: Float32,
    *,
    start_position: int,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sparse_blocks: int = 0,
    num_sinks: int = 0,
    sink_queries: Float32 | None = None,
    arithmetic: RowArithmetic,
) -> Float32:
    """Return what each query token of one request reads from its context.

    Args:
        queries: Rotated, `[num_tokens, num_heads, head_dim]`, at positions from `start_position`.
        keys, values: Of positions 0 to the last query's, `[num_kv_heads, context_length, head_dim]`. What lies before
            every window and is no sink may be anything.
        window: Tokens a query sees, its own included; `None` means all.
        softcap: Bound c of scores, `c * tanh(score / c)`; 0 means none.
        sparse_blocks: 16-token tiles that a query reads; 0 means all.
        num_sinks: With a window, first tokens that stay visible.
        sink_queries: As `queries`, but what scores sinks from position `num_sinks + window` on.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = len(keys)
    group = num_heads // num_kv_heads
    first_visible = 0 if window is None else max(0, start_position - window + 1)
    key_tiles = _token_tiles(keys, num_sinks, first_visible)
    value_tiles = np.ascontiguousarray(_token_tiles(values, num_sinks, first_visible).swapaxes(-1, -2))

    # Rows of a KV head: its query heads of token 0, of token 1, ...
    def tiles_of(each: Float32) -> Float32:
        by_kv_head = each.reshape(num_tokens, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
        return arithmetic.tiles(by_kv_head.reshape(num_kv_heads, num_tokens * group, head_dim))

    query_tiles = tiles_of(queries)
    sink_tiles = None if sink_queries is None else tiles_of(sink_queries)
    num_tiles = query_tiles.shape[1]
    # A padded row repeats the last position, so that it sees something and stays finite.
    tokens = np.minimum(np.arange(num_tiles * arithmetic.tile_rows) // group, num_tokens - 1)
    positions = (start_position + tokens).reshape(num_tiles, arithmetic.tile_rows)

    read = None
    if sparse_blocks:
        rows = np.arange(start_position, start_position + num_tokens)
        chosen = chosen_tiles(queries, *tile_bounds(keys), rows, sparse_blocks)
        read = _read_lanes(chosen, num_kv_heads, query_tiles.shape[1:3], key_tiles.shape[1])

    out = np.empty_like(query_tiles)
    at_a_time = max(1, _MAX_SCORES // (num_kv_heads * arithmetic.tile_rows * key_tiles.shape[1] * TILE_TOKENS))
    for first in range(0, num_tiles, at_a_time):
        turn = slice(first, first + at_a_time)
        seen = _tiles_seen(positions[turn], num_sinks, window)
        out[:, turn] = _attend_tiles(
            query_tiles[:, turn],
            key_tiles[:, seen],
            value_tiles[:, seen],
            _visible(positions[turn], seen, num_sinks, window)[None]
            if read is None
            else _visible(positions[turn], seen, num_sinks, window)[None] & read[:, turn, seen],
            np.float32(scale),
            softcap,
            arithmetic,
            None if sink_tiles is None else (sink_tiles[:, turn], _scored_as_sinks(positions[turn], num_sinks, window)),
        )
    rows = out.reshape(num_kv_heads, -1, head_dim)[:, : num_tokens * group]
    return rows.reshape(num_kv_heads, num_tokens, group, head_dim).transpose(1, 0, 2, 3).reshape(queries.shape)


def _attend_tiles(
    queries: Float32,
    keys: Float32,
    values: Float32,
    visible: NDArray[np.bool_],
    scale: np.float32,
    softcap: float,
    arithmetic: RowArithmetic,
    sinks: tuple[Float32, NDArray[np.bool_]] | None,
) -> Float32:
    """Attend for some query tiles; Q query tiles, K key tiles.

    Args:
        queries: `[num_kv_heads, Q, tile_rows, head_dim]`.
        keys: `[num_kv_heads, K, TILE_TOKENS, head_dim]`.
        values: Transposed, `[num_kv_heads, K, head_dim, TILE_TOKENS]`.
        visible: `[num_kv_heads or 1, Q, K, tile_rows, TILE_TOKENS]`.
        sinks: Queries for the sinks like `queries`, and where they apply in the first tiles, like `visible`.
    """
    products = arithmetic.multiply(keys[:, None], queries[:, :, None]).swapaxes(-1, -2)
    if sinks is not None:
        sink_queries, is_sink = sinks
        num_tiles = is_sink.shape[1]
        sink_products = arithmetic.multiply(keys[:, None, :num_tiles], sink_queries[:, :, None]).swapaxes(-1, -2)
        products[:, :, :num_tiles] = np.where(is_sink, sink_products, products[:, :, :num_tiles])
    # Into a C-contiguous array: results of NumPy functions inherit the memory order of their inputs, and the sums below
    # are in a fixed order only along a contiguous axis.
    scores = np.full(products.shape, -np.inf, np.float32)
    np.multiply(products, scale, out=scores, where=visible)
    if softcap:
        np.copyto(scores, soft_cap(scores, softcap), where=visible)
    weights = np.exp(scores - scores.max(axis=(2, 4), keepdims=True))
    tile_sums = np.add.reduce(weights, axis=-1)
    tile_outs = arithmetic.multiply(values[:, None], weights)
    weight_sum = np.zeros_like(tile_sums[:, :, 0])
    out = np.zeros_like(tile_outs[:, :, 0])
    for tile in range(keys.shape[1]):
        weight_sum += tile_sums[:, :, tile]
        out += tile_outs[:, :, tile]
    out /= weight_sum[:, :, None]
    return out.swapaxes(-1, -2)


def _read_lanes(
    chosen: NDArray[np.bool_], num_kv_heads: int, query_shape: tuple[int, int], num_key_tiles: int
) -> NDArray[np.bool_]:
    """Spread chosen tiles over lanes: `[num_kv_heads, query tile, key tile, row, TILE_TOKENS]`."""
    num_tokens, num_heads, _ = chosen.shape
    num_query_tiles, tile_rows = query_shape
    lanes = np.zeros((num_tokens, num_heads, num_key_tiles * TILE_TOKENS), np.bool_)
    spread = chosen.repeat(SPARSE_TILE_TOKENS, axis=2)[:, :, : lanes.shape[2]]
    lanes[:, :, : spread.shape[2]] = spread
    by_kv_head = lanes.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, -1).transpose(1, 0, 2, 3)
    rows = by_kv_head.reshape(num_kv_heads, -1, lanes.shape[2])
    # A padded row repeats the last one.
    padded = rows[:, np.minimum(np.arange(num_query_tiles * tile_rows), rows.shape[1] - 1)]
    tiles = padded.reshape(num_kv_heads, num_query_tiles, tile_rows, num_key_tiles, TILE_TOKENS)
    return tiles.transpose(0, 1, 3, 2, 4)


def _token_tiles(stored: Float32, num_sinks: int, first_visible: int) -> Float32:
    """Cut `[num_kv_heads, context_length, head_dim]` into tiles; what no row can see becomes zero."""
    num_kv_heads, context_length, head_dim = stored.shape
    num_tiles = cdiv(context_length, TILE_TOKENS)
    padded = np.zeros((num_kv_heads, num_tiles * TILE_TOKENS, head_dim), np.float32)
    padded[:, :num_sinks][:, :context_length] = stored[:, :num_sinks]
    padded[:, first_visible:context_length] = stored[:, first_visible:]
    return padded.reshape(num_kv_heads, num_tiles, TILE_TOKENS, head_dim)


def _tiles_seen(positions: NDArray[np.int64], num_sinks: int, window: int | None) -> NDArray[np.int64]:
    """Return the key tiles of which any of these rows sees anything."""
    first = 0 if window is None else max(0, int(positions.min()) - window + 1)
    stop = int(positions.max()) // TILE_TOKENS + 1
    num_sink_tiles = min(stop, cdiv(num_sinks, TILE_TOKENS))
    tiles = [*range(num_sink_tiles), *range(max(num_sink_tiles, first // TILE_TOKENS), stop)]
    return np.array(tiles, np.int64)


def _visible(
    positions: NDArray[np.int64], seen: NDArray[np.int64], num_sinks: int, window: int | None
) -> NDArray[np.bool_]:
    """Return `[query tile, key tile, row, key]`: which keys each row sees."""
    keys = (seen[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS))[None, :, None, :]
    rows = positions[:, None, :, None]
    visible = keys <= rows
    if window is not None:
        visible &= (keys > rows - window) | (keys < num_sinks)
    return visible


def _scored_as_sinks(positions: NDArray[np.int64], num_sinks: int, window: int | None) -> NDArray[np.bool_]:
    """Return `[query tile, key tile, row, key]` of the tiles with sinks: where the queries of the sinks apply."""
    assert window is not None, "sinks stand before a window"
    num_sink_tiles = min(cdiv(num_sinks, TILE_TOKENS), int(positions.max()) // TILE_TOKENS + 1)
    keys = np.arange(num_sink_tiles * TILE_TOKENS).reshape(1, -1, 1, TILE_TOKENS)
    return (keys < num_sinks) & (positions[:, None, :, None] >= num_sinks + window)
