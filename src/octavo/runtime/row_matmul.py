"""Matrix products in which the bits of a row depend on that row alone.

NumPy hands a product to BLAS, which picks its kernel by the shape: one row, seven rows and five hundred rows take
different paths, sum in different orders and differ in the last bits. The invariance contract forbids that, so every
product here is cut into calls of one fixed shape:

    weights  [panel, width]         a panel of weight rows, always as many
    rows     [tile_rows, width]     a tile of input rows, always as many, padded with zeros
    product  [panel, tile_rows]     = weights @ rows.T

A row then always sits in some lane of the same kernel. That lanes agree is not a promise of any BLAS: OpenBLAS's AVX2
kernel gives rows 0-5, 6-11 and 12-15 of a 16-row tile different bits, and agrees in all lanes of an 8-row tile. So the
height is chosen by trying it, and where no height passes, NumPy's own loop is used.

Small panels are also faster than one call over the whole weight (for eight rows of 960 x 576: 3.5 times with AVX-512,
1.2 times with AVX2): BLAS packs its operands anew in every call, and small shapes skip that or stay in the cache. And
they stay below the size from which OpenBLAS wakes its other threads, so that their number cannot change the shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.units import cdiv

Float32 = NDArray[np.float32]
Shape = tuple[int, int]
"""`(panel, width)` of one product."""

_TILE_ROWS = (8, 4)
_MAX_PANEL = 64
# OpenBLAS uses one thread below 2 x 2^18 multiplications.
_MAX_MULTIPLICATIONS = 2**19 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArithmetic:
    """How products of row tiles are computed on this machine, and why.

    Args:
        tile_rows: Rows per tile.
        uses_blas: Whether BLAS multiplies, or NumPy's own loop (about as fast for one row, ten times slower for many).
        reason: What was tried, for people to read.
    """

    tile_rows: int
    uses_blas: bool
    reason: str

    def tiles(self, rows: Float32) -> Float32:
        """Cut `[..., num_rows, width]` into `[..., num_tiles, tile_rows, width]`, the last tile padded with zeros."""
        *batch, num_rows, width = rows.shape
        num_tiles = cdiv(num_rows, self.tile_rows)
        padded = np.zeros((*batch, num_tiles * self.tile_rows, width), np.float32)
        padded[..., :num_rows, :] = rows
        return padded.reshape(*batch, num_tiles, self.tile_rows, width)

    def multiply(self, weights: Float32, tiles: Float32) -> Float32:
        """Multiply panels by tiles: `[..., panel, width]` and `[..., tile_rows, width]` give `[..., panel, tile_rows]`.

        Leading axes broadcast as in `numpy.matmul`. Both must be contiguous in their last two axes.
        """
        assert tiles.shape[-2] == self.tile_rows, "every tile has the same height"
        transposed = tiles.swapaxes(-1, -2)
        return np.matmul(weights, transposed) if self.uses_blas else _sum_products(weights, transposed)


def choose_row_arithmetic(shapes: Iterable[Shape]) -> RowArithmetic:
    """Return the fastest arithmetic whose bits do not depend on the lane, for all of these shapes.

    Cost: a few milliseconds per shape.
    """
    distinct = sorted(set(shapes))
    failures: list[str] = []
    for tile_rows in _TILE_ROWS:
        unequal = next((shape for shape in distinct if not lanes_agree(shape, tile_rows)), None)
        if unequal is None:
            chosen = f"tiles of {tile_rows} rows: bits agree in all lanes of all {len(distinct)} shapes"
            return RowArithmetic(tile_rows=tile_rows, uses_blas=True, reason="; ".join([chosen, *failures]))
        failures.append(f"lanes differ in tiles of {tile_rows} rows at panel x width {unequal[0]} x {unequal[1]}")
    return RowArithmetic(tile_rows=1, uses_blas=False, reason="; ".join(["sums without BLAS", *failures]))


def lanes_agree(shape: Shape, tile_rows: int) -> bool:
    """Try whether a row gets the same bits in every lane, beside any other rows, at any alignment.

    Random numbers make a lucky pass next to impossible: two summation orders differ in about every third output, and
    each lane has `panel` of them.
    """
    panel, width = shape
    rng = np.random.default_rng(width * _MAX_PANEL + panel)
    weights = rng.standard_normal((panel, width), dtype=np.float32)
    row = rng.standard_normal(width, dtype=np.float32)
    expected = np.matmul(weights, np.tile(row, (tile_rows, 1)).T)[:, 0]
    for lane in range(tile_rows):
        tile = _at_offset(rng.standard_normal((tile_rows, width), dtype=np.float32), lane)
        tile[lane] = row
        product = np.matmul(_at_offset(weights, lane + 1), tile.T)
        if not np.array_equal(product[:, lane], expected):
            return False
    return bool(np.array_equal(np.matmul(weights, np.tile(row, (tile_rows, 1)).T), np.tile(expected, (tile_rows, 1)).T))


def panel_rows(width: int) -> int:
    """Return how many weight rows of this width make a panel: a power of two from 8 to 64."""
    panel = _MAX_PANEL
    while panel > 8 and panel * width * _TILE_ROWS[0] > _MAX_MULTIPLICATIONS:
        panel //= 2
    return panel


class RowMatmul:
    """`x @ weight.T` for one weight `[num_outputs, width]`, with bits that depend on nothing but the row of x.

    Keeps a view of the weight, and a zero-padded copy of its last few rows where they do not fill a panel.
    """

    def __init__(self, weight: Float32, arithmetic: RowArithmetic) -> None:
        assert weight.dtype == np.float32 and weight.flags.c_contiguous, "a weight is held as it is used"
        num_outputs, width = weight.shape
        panel = panel_rows(width)
        num_whole = num_outputs // panel
        self._arithmetic = arithmetic
        self._num_outputs = num_outputs
        self._panels = [weight[: num_whole * panel].reshape(num_whole, panel, width)] if num_whole else []
        if num_outputs % panel:
            last = np.zeros((1, panel, width), np.float32)
            last[0, : num_outputs % panel] = weight[num_whole * panel :]
            self._panels.append(last)

    def __call__(self, x: Float32) -> Float32:
        """Multiply `[num_rows, width]`; returns `[num_rows, num_outputs]`."""
        num_rows = len(x)
        tiles = self._arithmetic.tiles(x)
        # Panels outside, tiles inside: a panel is read from memory once and meets all tiles in the cache.
        products = [self._arithmetic.multiply(panels[:, None], tiles[None]) for panels in self._panels]
        # [panel, tile, output, row] to [tile x row, panel x output]
        columns = [
            product.transpose(1, 3, 0, 2).reshape(tiles.shape[0] * tiles.shape[1], product.shape[0] * product.shape[2])
            for product in products
        ]
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        return joined[:num_rows, : self._num_outputs]


def _sum_products(weights: Float32, transposed: Float32) -> Float32:
    """Multiply with NumPy's own loop along the contiguous axis, row by row: one order, whatever the BLAS."""
    lanes = [
        np.einsum("...ck,...k->...c", weights, transposed[..., lane], optimize=False)
        for lane in range(transposed.shape[-1])
    ]
    return np.stack(lanes, axis=-1)


def _at_offset(values: Float32, num_floats: int) -> Float32:
    """Return a copy that starts `num_floats` after wherever an allocation starts."""
    buffer = np.empty(values.size + num_floats, np.float32)
    copy = buffer[num_floats:].reshape(values.shape)
    copy[...] = values
    return copy
