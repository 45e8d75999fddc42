"""KVStorage: the reference runner's keys and values, one record per block.

    record of a block   [layer in group, K or V, kv_head, place, head_dim]

A block belongs to one KV group at a time; all groups draw equal-sized records from one pool, so a copy moves a whole
record whatever the group. The layout is this runner's own affair (the native runner's differs); `read_kv` gives what
both must agree on. Any block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import KVDtype
from octavo.core.step import NULL_BLOCK, BlockCopy
from octavo.models.spec import ModelSpec
from octavo.units import cdiv

Float32 = NDArray[np.float32]
Stored = NDArray[np.generic]

_STORED_AS: dict[KVDtype, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


class KVStorage:
    """Owns the records of `num_blocks` usable blocks and the null block.

    Args:
        spec: Gives the KV groups, heads and head width.
        num_blocks: Usable blocks, ids 1 to `num_blocks`; the null block is one more.
        block_size: Tokens per block.
        dtype: What keys and values are rounded to when stored. Reading gives float32 back.
        poison: Fill everything with NaN, so that a read of something never written shows.
    """

    def __init__(
        self, spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: KVDtype, poison: bool = False
    ) -> None:
        layers_per_block = max(len(group.layers) for group in spec.kv_groups)
        shape = (num_blocks + 1, layers_per_block, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self._records = np.zeros(shape, _STORED_AS[dtype])
        self._dtype: KVDtype = dtype
        self._block_size = block_size
        self._layer_in_group = {layer: place for group in spec.kv_groups for place, layer in enumerate(group.layers)}
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

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, in all layers."""
        self._records[list(block_ids)] = encode(np.full(1, np.nan, np.float32), self._dtype)

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
        records = self._records[:, self._layer_in_group[layer]]
        records[block_ids, 0, :, places] = encode(keys, self._dtype)
        records[block_ids, 1, :, places] = encode(values, self._dtype)

    def gather(self, layer: int, block_ids: NDArray[np.int32], num_tokens: int) -> tuple[Float32, Float32]:
        """Read positions 0 to `num_tokens - 1` through a block table: two `[num_kv_heads, num_tokens, head_dim]`."""
        keys, values = self._stored(layer, block_ids, num_tokens)
        return decode(keys, self._dtype), decode(values, self._dtype)

    def read_kv(self, layer: int, block_ids: Sequence[int], num_tokens: int) -> tuple[Stored, Stored]:
        """Return keys and values as stored (bf16 as its 16 bits): two `[num_tokens, num_kv_heads, head_dim]`."""
        keys, values = self._stored(layer, np.asarray(block_ids, np.int32), num_tokens)
        return keys.transpose(1, 0, 2), values.transpose(1, 0, 2)

    def _stored(self, layer: int, block_ids: NDArray[np.int32], num_tokens: int) -> tuple[Stored, Stored]:
        num_needed = cdiv(num_tokens, self.block_size)
        records = self._records[block_ids[:num_needed], self._layer_in_group[layer]]
        # [block, K or V, head, place, dim] to [K or V, head, block x place, dim]
        _, _, num_heads, _, head_dim = records.shape
        joined = records.transpose(1, 2, 0, 3, 4).reshape(2, num_heads, -1, head_dim)
        return joined[0, :, :num_tokens], joined[1, :, :num_tokens]


def encode(values: Float32, dtype: KVDtype) -> Stored:
    """Round to the nearest number of the KV dtype, ties to even; bf16 as its 16 bits.

    A magnitude beyond float16's 65,504 becomes infinity, as the F16C instructions do it: a wrong number that shows,
    rather than one that hides.
    """
    if dtype == "f32":
        return values
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    # Rounding could carry a NaN's bits into infinity or zero; keep it a (quiet) NaN.
    return np.where(np.isnan(values), bits >> 16 | np.uint32(0x40), rounded).astype(np.uint16)


def decode(stored: Stored, dtype: KVDtype) -> Float32:
    """Return the float32 numbers that stored ones stand for; exact."""
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
