"""Sparse reading: which layers read only the tiles of keys that matter to a query, and what that needs of a model.

A tile is 16 tokens, the unit of the native kernels, whatever the block size. For each tile and KV head the least and
the greatest of every dimension of its keys are kept, as bf16, rounded outward. They bound q.k from above, and a query
reads the tiles with the highest bounds: `sparse_blocks` of them, the first and its own always.

Source of the idea: Quest, query-aware sparsity (Tang et al., 2024).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.config.engine import NATIVE_TILE_TOKENS
from octavo.errors import InvalidParameterError
from octavo.models.spec import ModelSpec

TILE_TOKENS = NATIVE_TILE_TOKENS

NUM_DENSE_LAYERS = 2
"""The first layers spread their attention evenly: there every tile matters (Quest leaves out the same two)."""

BOUND_BYTES = 2


def with_sparse_blocks(spec: ModelSpec, sparse_blocks: int) -> ModelSpec:
    """Return the model reading so many tiles a query; 0 leaves it as it is.

    Raises:
        InvalidParameterError: layers that see a window, or a head width that bounds cannot be laid out for.
    """
    if not sparse_blocks:
        return spec
    because = ""
    if any(group.window is not None for group in spec.kv_groups):
        because = "layers of this model see a window, which is a choice of its own"
    elif spec.head_dim % 4:
        because = f"bounds are laid out for heads of a multiple of 4, and this model's have {spec.head_dim} dimensions"
    if because:
        raise InvalidParameterError(
            "does not suit this model",
            param="sparse_blocks",
            because=because,
            hints=("leave out --sparse-blocks",),
        )
    return replace(spec, sparse_blocks=sparse_blocks)


def is_sparse_layer(spec: ModelSpec, layer: int) -> bool:
    """Return whether a layer reads only some tiles."""
    return spec.sparse_blocks > 0 and layer >= NUM_DENSE_LAYERS


def bounds_bytes(spec: ModelSpec, layer: int, block_size: int) -> int:
    """Return the bytes of a layer's bounds in one block: least and greatest per tile, KV head and dimension."""
    if not is_sparse_layer(spec, layer):
        return 0
    assert block_size % TILE_TOKENS == 0, "bounds are kept for whole tiles"
    return block_size // TILE_TOKENS * spec.num_kv_heads * 2 * spec.head_dim * BOUND_BYTES
