"""KVStorage: the reference runner's keys and values, one record per block.

    record of a block      layer | layer | ...                          as `models/kv_record.py` lays them out
    layer                  [K or V, kv_head, place, head_dim]
    quantised layer        [K or V, kv_head, place, bytes of codes] | scales [K or V, kv_head, place]

A block belongs to one KV group at a time; all groups draw equal-sized records from one pool, so a copy moves a whole
record whatever the group. The order inside of a layer is this runner's own affair (the native runner's differs);
`read_kv` gives what both must agree on. Any block size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import KVDtype
from octavo.core.step import NULL_BLOCK, BlockCopy
from octavo.models.kv_record import SCALE_BYTES, is_quantised, kv_record, row_code_bytes
from octavo.models.spec import ModelSpec
from octavo.runtime.kv_codes import STORED_AS, Float32, Scales, Stored, decode, dequantise, encode, quantise
from octavo.units import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Views of one layer in all records.

    Args:
        numbers: `[num_records, K or V, kv_head, place, numbers or bytes of a row]`.
        scales: `[num_records, K or V, kv_head, place]`; empty where numbers are not quantised.
    """

    dtype: KVDtype
    numbers: Stored
    scales: Scales


class KVStorage:
    """Owns the records of `num_blocks` usable blocks and the null block.

    Args:
        spec: Gives the KV groups, heads and head width.
        num_blocks: Usable blocks, ids 1 to `num_blocks`; the null block is one more.
        block_size: Tokens per block.
        dtype: What keys and values are rounded to when stored. Reading gives float32 back.
        skip_layers: Layers that a quantised dtype leaves in 16 bit.
        poison: Fill everything with NaN, so that a read of something never written shows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: KVDtype,
        skip_layers: Sequence[int] = (),
        poison: bool = False,
    ) -> None:
        record = kv_record(spec, dtype=dtype, block_size=block_size, skip_layers=skip_layers)
        self._records = np.zeros((num_blocks + 1, record.block_bytes), np.uint8)
        self._layers = [
            _layer_view(self._records[:, offset:], spec, held, block_size)
            for offset, held in zip(record.layer_offsets, record.dtypes, strict=True)
        ]
        self._block_size = block_size
        if poison:
            self.poison(range(num_blocks + 1))

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Usable blocks, the null block not counted."""
        return len(self._records) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, the null block included."""
        return self._records.nbytes

    def dtype_of(self, layer: int) -> KVDtype:
        """Return how a layer is held."""
        return self._layers[layer].dtype

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, in all layers: all bits set is a NaN in every float type, scales included."""
        self._records[list(block_ids)] = 0xFF

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, in any order: no block is both source and destination."""
        sources = [copy.source for copy in copies]
        destinations = [copy.destination for copy in copies]
        assert not set(sources) & set(destinations), "a block is source and destination of copies"
        assert NULL_BLOCK not in destinations, "the null block is never written"
        self._records[destinations] = self._records[sources]

    def write(
        self, layer: int, block_ids: NDArray[np.int32], places: NDArray[np.int32], keys: Float32, values: Float32
    ) -> None:
        """Store one token per row into its slot. Keys and values are `[num_tokens, num_kv_heads, head_dim]`."""
        held = self._layers[layer]
        for part, rows in enumerate((keys, values)):
            if is_quantised(held.dtype):
                codes, scales = quantise(rows, held.dtype)
                held.numbers[block_ids, part, :, places] = codes
                held.scales[block_ids, part, :, places] = scales
            else:
                held.numbers[block_ids, part, :, places] = encode(rows, held.dtype)

    def gather(self, layer: int, block_ids: NDArray[np.int32], num_tokens: int) -> tuple[Float32, Float32]:
        """Read positions 0 to `num_tokens - 1` through a block table: two `[num_kv_heads, num_tokens, head_dim]`."""
        held = self._layers[layer]
        keys, values = self._joined(held.numbers, block_ids, num_tokens)
        if not is_quantised(held.dtype):
            return decode(keys, held.dtype), decode(values, held.dtype)
        key_scales, value_scales = self._joined(held.scales, block_ids, num_tokens)
        return dequantise(keys, key_scales, held.dtype), dequantise(values, value_scales, held.dtype)

    def read_kv(self, layer: int, block_ids: Sequence[int], num_tokens: int) -> tuple[Stored, ...]:
        """Return keys and values as stored (see `STORED_AS`): two `[num_tokens, num_kv_heads, numbers of a row]`.

        Of a quantised layer these are codes, and two arrays of scales `[num_tokens, num_kv_heads, 1]` follow.
        """
        held, blocks = self._layers[layer], np.asarray(block_ids, np.int32)
        parts = list(self._joined(held.numbers, blocks, num_tokens))
        if is_quantised(held.dtype):
            parts += [each[..., None] for each in self._joined(held.scales, blocks, num_tokens)]
        return tuple(part.transpose(1, 0, 2) for part in parts)

    def _joined(
        self, parts: NDArray[Any], block_ids: NDArray[np.int32], num_tokens: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return keys' and values' part of a layer in the order of positions: two `[num_kv_heads, num_tokens, ...]`."""
        blocks = parts[block_ids[: cdiv(num_tokens, self.block_size)]]
        # [block, K or V, head, place, ...] to [K or V, head, block x place, ...]
        _, _, num_heads, _, *rest = blocks.shape
        joined = np.moveaxis(blocks, 0, 2).reshape(2, num_heads, -1, *rest)
        return joined[0, :, :num_tokens], joined[1, :, :num_tokens]


def _layer_view(records: NDArray[np.uint8], spec: ModelSpec, dtype: KVDtype, block_size: int) -> _Layer:
    """Return views of a layer that starts at byte 0 of `records`."""
    rows = (2, spec.num_kv_heads, block_size)
    num_rows = math.prod(rows)
    num_code_bytes = num_rows * row_code_bytes(dtype, spec.head_dim)
    num_scale_bytes = num_rows * SCALE_BYTES if is_quantised(dtype) else 0
    numbers = records[:, :num_code_bytes].view(STORED_AS[dtype])
    scales = records[:, num_code_bytes : num_code_bytes + num_scale_bytes].view(np.uint16)
    return _Layer(
        dtype=dtype,
        numbers=numbers.reshape(len(records), *rows, -1),
        scales=scales.reshape(len(records), *rows) if num_scale_bytes else scales,
    )
