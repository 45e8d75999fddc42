"""What one token's keys and values take in memory, and where each layer lies in the record of a block.

A *row* is the key or the value of one token and one KV head. A quantised row is its codes and one bf16 scale:

    f32 4, f16 and bf16 2, int8 and fp8_e4m3 1, int4 1/2 bytes per number, and 2 bytes per row where quantised

Layers of a KV group share block tables, and all groups draw blocks from one pool, so records of all groups have one
size: that of the group that needs most. The numbers here are what runners allocate and what the planner counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from octavo.config.engine import KVDtype
from octavo.models.sparse import bounds_bytes
from octavo.models.spec import KVGroup, ModelSpec

SCALE_BYTES = 2
SKIPPED_LAYER_DTYPE: Final[KVDtype] = "f16"
"""How layers are held that a quantised cache leaves out."""

NUMBER_BITS: dict[KVDtype, int] = {"f32": 32, "f16": 16, "bf16": 16, "int8": 8, "fp8_e4m3": 8, "int4": 4}


def is_quantised(dtype: KVDtype) -> bool:
    """Return whether rows are held as codes with a scale."""
    return NUMBER_BITS[dtype] < 16


def row_code_bytes(dtype: KVDtype, head_dim: int) -> int:
    """Return the bytes of a row without its scale. `int4` packs numbers in pairs, so it takes even widths only."""
    assert head_dim * NUMBER_BITS[dtype] % 8 == 0, "pairs of int4 need an even head_dim"
    return head_dim * NUMBER_BITS[dtype] // 8


def row_bytes(dtype: KVDtype, head_dim: int) -> int:
    """Return the bytes of a row, its scale included."""
    return row_code_bytes(dtype, head_dim) + (SCALE_BYTES if is_quantised(dtype) else 0)


def layer_dtypes(num_layers: int, dtype: KVDtype, skip_layers: Sequence[int] = ()) -> tuple[KVDtype, ...]:
    """Return how each layer is held: skipped ones in 16 bit."""
    assert not skip_layers or is_quantised(dtype), "only a quantised cache skips layers"
    return tuple(SKIPPED_LAYER_DTYPE if layer in skip_layers else dtype for layer in range(num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRecord:
    """The record of a block: where each layer's keys and values lie in it.

    Args:
        block_bytes: Of a whole record, the same for all groups.
        layer_offsets: First byte of each layer of the model in a record of its group.
        dtypes: How each layer is held.
        windows: For each group, the tokens a query sees (`None`: all).
        block_size: Tokens in a block.
    """

    block_bytes: int
    layer_offsets: tuple[int, ...]
    dtypes: tuple[KVDtype, ...]
    windows: tuple[int | None, ...]
    block_size: int


def kv_record(spec: ModelSpec, *, dtype: KVDtype, block_size: int, skip_layers: Sequence[int] = ()) -> KVRecord:
    """Lay out the layers of a model: one after the other in the order of their group."""
    dtypes = layer_dtypes(spec.num_layers, dtype, skip_layers)
    groups = spec.kv_groups or (KVGroup(layers=tuple(range(spec.num_layers))),)
    offsets: dict[int, int] = {}
    block_bytes = 0
    for group in groups:
        at = 0
        for layer in group.layers:
            offsets[layer] = at
            at += 2 * spec.num_kv_heads * block_size * row_bytes(dtypes[layer], spec.head_dim)
            at += bounds_bytes(spec, layer, block_size)
        block_bytes = max(block_bytes, at)
    return KVRecord(
        block_bytes=block_bytes,
        layer_offsets=tuple(offsets[layer] for layer in range(spec.num_layers)),
        dtypes=dtypes,
        windows=tuple(group.window for group in groups),
        block_size=block_size,
    )
