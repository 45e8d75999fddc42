"""How engines form groups of layers that keep unlike things, so that all draw equal-sized blocks from one pool.

Layers are sorted by what they keep. If all keep the same, or the engine knows no groups, there is one group with all of
them. Else every group gets as many layers as the rarer kind has (or all of the larger kind, if that is less than half
as many again), and its blocks have the bytes of the costliest kind: a kind that keeps less per token gets more tokens a
block; a state is given a block of its own, for which blocks of attention grow until it fits.

Source: `vllm/v1/core/kv_cache_utils.py` and `vllm/model_executor/models/config.py` of vLLM, as its logs confirm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import UnsupportedModelError
from octavo.models.kv_groups import group_size
from octavo.planner.engine_version import EngineVersion
from octavo.planner.kv_format import Engine
from octavo.planner.layer_group import LayerGroup
from octavo.units import cdiv, format_bytes

CostKind = Literal["full", "sliding", "chunked", "latent", "state", "none"]
Grouping = tuple[tuple[LayerGroup, ...], int, int]
"""Groups, bytes of a block, and tokens in a block as the engine counts them."""

# Kernels of attention take blocks of multiples of so many tokens; those of latent attention of more.
_ALIGNMENT = 16
_LATENT_ALIGNMENT = 64
# Since then a request of a caching engine holds two states a layer, the live one and the last cached.
_CACHED_STATES_SINCE = EngineVersion(0, 15)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer keeps on one device: so many bytes per token, or per request (state)."""

    kind: CostKind
    window: int | None = None
    token_bytes: int = 0
    state_bytes: int = 0


def group_layers(
    costs: Sequence[LayerCost],
    *,
    engine: Engine,
    block_size: int,
    is_flat: bool,
    version: EngineVersion,
    is_caching: bool,
) -> Grouping:
    """Form the groups of one device's layers.

    Args:
        is_flat: The engine knows no groups: every layer that keeps tokens keeps all of them.

    Raises:
        UnsupportedModelError: kinds whose blocks cannot be made equal.
    """
    by_cost: dict[LayerCost, int] = {}
    for cost in costs:
        if cost.kind != "none":
            by_cost[cost] = by_cost.get(cost, 0) + 1
    attention = {cost: count for cost, count in by_cost.items() if cost.kind != "state"}
    states = {cost: count for cost, count in by_cost.items() if cost.kind == "state"}
    if not attention:
        raise UnsupportedModelError("a model without attention keeps no tokens, so there is no KV pool to plan")
    if is_flat or (len(attention) == 1 and not states):
        # vLLM's first engine kept states in memory of their own, outside the pool.
        pooled = {} if engine == "vllm" else states
        return _one_group(attention, pooled, block_size=block_size, is_flat=is_flat, is_capped=engine == "octavo")
    if states:
        block_size = _enlarged(attention, states, block_size)
    num_states = 2 if is_caching and version >= _CACHED_STATES_SINCE else 1
    return _equal_groups(attention, states, block_size=block_size, num_states=num_states, is_capped=engine == "octavo")


def _one_group(
    attention: dict[LayerCost, int], states: dict[LayerCost, int], *, block_size: int, is_flat: bool, is_capped: bool
) -> Grouping:
    """Put all layers into one group; a state beside it is counted as the blocks it would fill."""
    token_bytes = sum(cost.token_bytes * count for cost, count in attention.items())
    only = next(iter(attention))
    group = LayerGroup(
        kind="full" if is_flat and only.kind != "latent" else _kind(only),
        num_layers=sum(attention.values()),
        block_size=block_size,
        token_bytes=token_bytes,
        window=None if is_flat else only.window,
        is_capped=is_capped,
    )
    block_bytes = block_size * token_bytes
    groups = [group]
    for cost, count in states.items():
        groups.append(
            LayerGroup(
                kind="state",
                num_layers=count,
                block_size=block_size,
                state_blocks=cdiv(cost.state_bytes * count, block_bytes),
                state_bytes=cost.state_bytes * count,
            )
        )
    return tuple(groups), block_bytes, block_size


def _enlarged(attention: dict[LayerCost, int], states: dict[LayerCost, int], block_size: int) -> int:
    """Return the block size at which one layer's block holds a state; the state is padded to it."""
    least = min(cost.token_bytes for cost in attention)
    most = max(cost.state_bytes for cost in states)
    align = _LATENT_ALIGNMENT if any(cost.kind == "latent" for cost in attention) else _ALIGNMENT
    return max(block_size, align * cdiv(most, align * least))


def _equal_groups(
    attention: dict[LayerCost, int],
    states: dict[LayerCost, int],
    *,
    block_size: int,
    num_states: int,
    is_capped: bool,
) -> Grouping:
    layers_per_group = group_size([*attention.values(), *states.values()])
    page_bytes = block_size * max(cost.token_bytes for cost in attention)
    groups: list[LayerGroup] = []
    for cost, count in attention.items():
        if page_bytes % cost.token_bytes or page_bytes // cost.token_bytes % block_size:
            raise UnsupportedModelError(
                f"layers of {format_bytes(cost.token_bytes)} a token cannot share blocks with layers of"
                f" {format_bytes(page_bytes // block_size)} a token",
                because="blocks of all kinds have equal bytes and hold whole multiples of the block size",
            )
        groups.extend(
            LayerGroup(
                kind=_kind(cost),
                num_layers=num_layers,
                block_size=page_bytes // cost.token_bytes,
                token_bytes=cost.token_bytes * num_layers,
                window=cost.window,
                is_capped=is_capped,
            )
            for num_layers in _cut(count, layers_per_group)
        )
    for cost, count in states.items():
        groups.extend(
            LayerGroup(
                kind="state",
                num_layers=num_layers,
                block_size=block_size,
                state_blocks=num_states,
                state_bytes=cost.state_bytes * num_layers,
            )
            for num_layers in _cut(count, layers_per_group)
        )
    return tuple(groups), layers_per_group * page_bytes, block_size


def _cut(count: int, size: int) -> list[int]:
    """Cut so many layers into groups of `size`, the last with fewer."""
    return [min(size, count - start) for start in range(0, count, size)]


def _kind(cost: LayerCost) -> Literal["full", "sliding", "chunked", "latent"]:
    assert cost.kind not in ("state", "none"), cost
    return cost.kind  # type: ignore[return-value]
