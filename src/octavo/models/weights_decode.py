"""Turns stored rows into float32. Exact: each value is the one that the format defines.

The common kinds are decoded here; the rest by the `gguf` package. Work goes through a bounded number of rows at a
time, because a decoder's temporaries are several times its output.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.models.tensor_kinds import TensorKind

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 20


def decode_f32(rows: Bytes, kind: TensorKind, num_columns: int) -> Floats:
    """Return `[rows, num_columns]` float32 for `[rows, row_bytes]` stored bytes."""
    decode = _DECODERS.get(kind) or _gguf_decoder(kind)
    values = np.empty((rows.shape[0], num_columns), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // max(1, num_columns))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        values[start : start + step] = decode(part).reshape(part.shape[0], num_columns)
    return values


def _f32(rows: Bytes) -> Floats:
    return rows.view("<f4")


def _f16(rows: Bytes) -> Floats:
    return rows.view("<f2").astype(np.float32)


def _bf16(rows: Bytes) -> Floats:
    return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(rows: Bytes) -> Floats:
    """A block is a scale in f16 and 32 signed bytes."""
    blocks = rows.reshape(-1, 34)
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(rows: Bytes) -> Floats:
    """A block is a scale in f16 and 32 codes of 4 bits, each 8 too high."""
    blocks = rows.reshape(-1, 18)
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(rows: Bytes) -> Floats:
    """A block is a scale and a minimum in f16 and 32 codes of 4 bits."""
    blocks = rows.reshape(-1, 20)
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _half(columns: Bytes) -> Floats:
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(codes: Bytes) -> Floats:
    """The low halves of 16 bytes are values 0..15 of a block, the high halves values 16..31."""
    return np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)


def _gguf_decoder(kind: TensorKind) -> Callable[[Bytes], Floats]:
    import gguf  # noqa: PLC0415  it takes 0.1 s to import, and common files do not need it

    type_id = gguf.GGMLQuantizationType[kind.upper()]
    return lambda rows: gguf.quants.dequantize(rows, type_id)


_DECODERS: dict[TensorKind, Callable[[Bytes], Floats]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
}
