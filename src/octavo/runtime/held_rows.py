"""Rows of a weight matrix in the kind they are to be held in.

Exact where the kind is the stored one or holds all its values; otherwise rounded to nearest, a piece at a time, and
refused where a value is beyond the kind's range. Nothing turns into infinity unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelFileError
from octavo.models.tensor_kinds import TensorKind, row_bytes
from octavo.models.weights import Tensor
from octavo.models.weights_decode import decode_f32
from octavo.runtime import _native

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 22


def hold(tensor: Tensor, kind: TensorKind) -> Bytes:
    """Return the rows of a matrix as stored in `kind`, `[rows, row_bytes]`; the tensor's own where that is its kind.

    Raises:
        ModelFileError: a value is not finite or beyond the range of `kind`.
    """
    if tensor.kind == kind:
        return tensor.data
    num_columns = tensor.shape[-1]
    held = np.empty((tensor.data.shape[0], row_bytes(kind, num_columns, tensor=tensor.name)), np.uint8)
    encode = _ENCODERS[kind]
    for rows in _chunks(len(held), num_columns):
        values = decode_f32(tensor.data[rows], tensor.kind, num_columns)
        encoded = encode(values)
        if encoded is None:
            raise ModelFileError(
                f"{tensor.name}: some of its values cannot be held as {kind}",
                because=f"they are not finite or beyond the range of {kind}",
                hints=("`--weight-dtype f32` holds every value",),
            )
        held[rows] = encoded.reshape(len(values), -1)
    return held


def _chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Cut the rows so that the float32 values of a piece stay below 16 MiB (or are one row)."""
    step = max(1, _CHUNK_VALUES // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _to_f32(values: Float32) -> Bytes:
    return values.view(np.uint8)


def _to_f16(values: Float32) -> Bytes | None:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return halves.view(np.uint8) if np.isfinite(halves).all() else None


def _to_bf16(values: Float32) -> Bytes | None:
    """Round to nearest, ties to even: the low half of the bits carries into the high half."""
    bits = values.view(np.uint32)
    halves = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return halves.view(np.uint8) if ((halves & 0x7F80) != 0x7F80).all() else None


def _to_blocks(kind: TensorKind) -> Callable[[Float32], Bytes | None]:
    return lambda values: _native.quantise_weights(kind, values)


_ENCODERS: dict[TensorKind, Callable[[Float32], Bytes | None]] = {
    "f32": _to_f32,
    "f16": _to_f16,
    "bf16": _to_bf16,
    "q8_0": _to_blocks("q8_0"),
    "q4_1": _to_blocks("q4_1"),
}
