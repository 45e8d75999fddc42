"""RopeTable: cosines and sines of rotary angles, made once per position."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.models.rope import attention_scaling, inverse_frequencies
from octavo.models.spec import Rope

Float32 = NDArray[np.float32]


class RopeTable:
    """Grows to the highest position seen.

    Angle, cosine and sine are doubles, scaled and rounded once to float32. They come from `math`, number by number:
    NumPy's own cosine differs from the C library's in the last bit on some machines, and every runner must agree.
    """

    def __init__(self, rope: Rope) -> None:
        self._frequencies = inverse_frequencies(rope) if rope.rotary_dim else ()
        self._scaling = attention_scaling(rope)
        self._cos_sin = np.empty((2, 0, len(self._frequencies)), np.float32)

    def cos_sin(self, positions: NDArray[np.int32]) -> tuple[Float32, Float32]:
        """Return `[num_positions, rotary_dim / 2]` cosines and sines."""
        self._grow(int(positions.max(initial=-1)) + 1)
        cos, sin = self._cos_sin[:, positions]
        return cos, sin

    def _grow(self, num_positions: int) -> None:
        num_known = self._cos_sin.shape[1]
        if num_positions <= num_known:
            return
        # At least double, so that a growing context does not copy the table token by token.
        new = range(num_known, max(num_positions, 2 * num_known, 64))
        angles = [[position * frequency for frequency in self._frequencies] for position in new]
        rows = [
            [[function(angle) * self._scaling for angle in row] for row in angles] for function in (math.cos, math.sin)
        ]
        self._cos_sin = np.concatenate([self._cos_sin, np.array(rows, np.float64).astype(np.float32)], axis=1)
