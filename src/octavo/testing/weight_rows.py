"""Random weights in every kind that the native kernels hold, as stored rows and as the values they stand for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.models.tensor_kinds import KIND_LAYOUTS, TensorKind

HELD_KINDS: tuple[TensorKind, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")

_SCALE_BYTES: dict[TensorKind, slice] = {
    "q8_0": slice(0, 2),
    "q4_0": slice(0, 2),
    "q4_1": slice(0, 4),
    "q4_k": slice(0, 4),
    "q6_k": slice(208, 210),
}


def random_rows(
    rng: np.random.Generator, kind: TensorKind, num_rows: int, num_inputs: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return stored rows `[num_rows, row_bytes]` and their values `[num_rows, num_inputs]`.

    Quantised blocks are random bytes, so that every code and every packed scale occurs, with half-float scales of
    either sign up to 0.1. The values come from the `gguf` package.
    """
    import gguf  # noqa: PLC0415  slow to import

    if kind in ("f32", "f16", "bf16"):
        values = rng.standard_normal((num_rows, num_inputs), dtype=np.float32)
        if kind == "f16":
            values = values.astype(np.float16)
        if kind == "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        rows = values.view(np.uint8).reshape(num_rows, -1)
    else:
        layout = KIND_LAYOUTS[kind]
        shape = (num_rows, num_inputs // layout.block_size, layout.block_bytes)
        blocks = rng.integers(0, 256, shape, dtype=np.uint8)
        halves = rng.uniform(-0.1, 0.1, (*shape[:2], 2)).astype(np.float16).view(np.uint8)
        where = _SCALE_BYTES[kind]
        blocks[..., where] = halves[..., : where.stop - where.start]
        rows = blocks.reshape(num_rows, -1)
    type_id = gguf.GGMLQuantizationType[kind.upper()]
    values = gguf.quants.dequantize(rows if kind != "f32" else rows.view(np.float32), type_id)
    return rows, np.asarray(values, np.float32).reshape(num_rows, num_inputs)
