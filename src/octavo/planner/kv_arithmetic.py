"""What a model's keys and values cost on one device, by layer, token, block and request, as each engine lays them out.

    bytes per token and layer = heads on this device x (key_dim + value_dim) x bytes per element (+ scales)
    heads on this device      = max(1, KV heads / tensor-parallel ranks): with more ranks than heads, ranks hold copies
    latent layers             = one vector, on every rank whole
    a block                   = block_size tokens of all layers of one group
    a request                 = the blocks it holds of every group

Octavo's own pool is sized by `memory.KVShape`, with the same counts (`block_counts.py`); the layout here says the same
in words that hold for other engines, too. `docs/kv-arithmetic.md` has worked examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import UnsupportedModelError
from octavo.models.shape import Layer, ModelShape
from octavo.planner.block_counts import longest_fitting
from octavo.planner.engine_version import EngineVersion
from octavo.planner.kv_format import Engine, KVFormat, kv_format
from octavo.planner.kv_grouping import LayerCost, group_layers
from octavo.planner.layer_group import LayerGroup
from octavo.units import cdiv

NEWEST = EngineVersion(99, 0)
_BLOCKS_ONLY_UNTIL = EngineVersion(0, 8)
"""vLLM's first engine charged every layer for every token, windows or not, in one group."""
_TOKENS_BY_CONCURRENCY_SINCE = EngineVersion(0, 21)
_LATENT_SINCE = EngineVersion(0, 7)
_EXPANDED_PADDED_TO = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV pool of one device: equal blocks that groups of layers draw from.

    Args:
        block_size: Tokens in a block, by which the engine itself counts.
        block_bytes: Bytes of one block of the pool.
        groups: What a request needs blocks of.
        max_num_batched_tokens: A step may hold so many tokens beside a window.
        is_counted_by_concurrency: The engine's token line is its concurrency x `max_model_len` (vLLM since 0.21);
            before, it is blocks / groups x block size.
        is_flat: The engine knows no groups, so its figures count attention alone.
        sequence_ranks: Ranks that each keep a share of every sequence (decode context parallelism).
    """

    engine: Engine
    kv_format: KVFormat
    block_size: int
    block_bytes: int
    groups: tuple[LayerGroup, ...]
    max_num_batched_tokens: int
    is_counted_by_concurrency: bool = False
    is_flat: bool = False
    sequence_ranks: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token costs on this device while no window is full, padding left out."""
        return cdiv(sum(group.token_bytes for group in self.groups), self.sequence_ranks)

    @property
    def padded_token_bytes(self) -> float:
        """Bytes of the pool that one more token costs while no window is full, padding included."""
        growing = [group for group in self.groups if group.kind != "state"]
        return sum(self.block_bytes / group.block_size for group in growing) / self.sequence_ranks

    @property
    def state_bytes(self) -> int:
        """Bytes that a request keeps whatever its length, padding left out."""
        return sum(group.state_bytes for group in self.groups)

    def num_blocks(self, pool_bytes: int) -> int:
        """Return the blocks of a pool, null block included."""
        return max(0, pool_bytes // self.block_bytes)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that one request of so many tokens holds, over all groups."""
        own = cdiv(num_tokens, self.sequence_ranks)
        return sum(group.blocks_for(own, max_num_batched_tokens=self.max_num_batched_tokens) for group in self.groups)

    def blocks_reserved(self, num_tokens: int) -> int:
        """Return the blocks of a contiguous reservation for so many tokens, windows or not."""
        own = cdiv(num_tokens, self.sequence_ranks)
        return sum(
            group.state_blocks if group.kind == "state" else cdiv(own, group.block_size) for group in self.groups
        )

    def blocks_shared(self, num_tokens: int) -> int:
        """Return the blocks that requests share whose first so many tokens are the same: those of full layers."""
        own = num_tokens // self.sequence_ranks
        return sum(own // group.block_size for group in self.groups if group.kind in ("full", "latent"))

    def concurrency(self, num_blocks: int, num_tokens: int) -> float:
        """Return the requests of so many tokens that a pool holds at once, as vLLM logs it."""
        return num_blocks / self.blocks_for(num_tokens)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the longest request, up to `limit` tokens, that so many blocks hold; 0 when none fits."""
        steps = {group.block_size for group in self.groups if group.kind != "state"} or {self.block_size}
        return longest_fitting(self.blocks_for, num_blocks, step=min(steps) * self.sequence_ranks, limit=limit)

    def logged_token_bytes(self, max_model_len: int | None = None) -> float:
        """Return what dividing the pool by its tokens gives, both as the engine's log states them.

        It is what a token costs only where all layers keep the same; with windows or states beside full layers it
        counts blocks of every group as if they grew with each token (until 0.21), or spreads a request's fixed part
        over its length (since).
        """
        if self.is_counted_by_concurrency:
            assert max_model_len is not None, "this engine counts tokens at max_model_len"
            return self.request_token_bytes(max_model_len)
        return self.block_bytes * self._num_counted_groups / (self.block_size * self.sequence_ranks)

    def request_token_bytes(self, num_tokens: int) -> float:
        """Return the bytes of the blocks of one request of so many tokens, per token."""
        return self.block_bytes * self.blocks_for(num_tokens) / num_tokens

    def logged_tokens(self, num_blocks: int, max_model_len: int | None = None) -> int:
        """Return the pool in tokens as the engine's log states it.

        Args:
            max_model_len: Needed where the engine derives the figure from its concurrency.
        """
        if self.is_counted_by_concurrency:
            assert max_model_len is not None, "this engine counts tokens at max_model_len"
            return int(self.concurrency(num_blocks, max_model_len) * max_model_len)
        return num_blocks // self._num_counted_groups * self.block_size * self.sequence_ranks

    @property
    def _num_counted_groups(self) -> int:
        return 1 if self.is_flat else len(self.groups)


def kv_layout(
    shape: ModelShape,
    *,
    engine: Engine = "octavo",
    version: EngineVersion = NEWEST,
    kv_dtype: str = "auto",
    block_size: int | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    max_num_batched_tokens: int = 8192,
    is_caching: bool = True,
) -> KVLayout:
    """Lay out the KV pool of one device; of pipeline stages, the one with the most to keep, which limits them all.

    Args:
        kv_dtype: As the engine spells it; `auto` is the model's own dtype.
        block_size: As asked; hybrids of other engines enlarge it until a state fits a block.
        is_caching: Prefixes are cached; then vLLM keeps two states a request, the live one and the last cached.

    Raises:
        InvalidParameterError: the engine has no such KV dtype.
        UnsupportedModelError: the engine's layout of this mix of layers is not known.
    """
    if any(layer.local is not None for layer in shape.layers):
        raise UnsupportedModelError(
            f"{shape.name}: layers whose cache entries stand for several tokens cannot be laid out",
            because="how engines do it cannot be told from their logs: one checkpoint shows 4 to 93 KiB a token",
        )
    stored = kv_format(engine, kv_dtype, model_dtype=shape.dtype)
    size = block_size or (1 if engine == "sglang" else 16)
    is_flat = engine == "sglang" or (engine == "vllm" and version < _BLOCKS_ONLY_UNTIL)
    layouts = []
    for stage in pipeline_stages(len(shape.layers), pipeline_parallel_size):
        costs = [
            layer_cost(
                shape.layers[number],
                stored,
                tensor_parallel_size=tensor_parallel_size,
                expanded_heads=shape.num_heads if engine == "vllm" and version < _LATENT_SINCE else 0,
            )
            for number in stage
        ]
        groups, block_bytes, real_size = group_layers(
            costs, engine=engine, block_size=size, is_flat=is_flat, version=version, is_caching=is_caching
        )
        layouts.append(
            KVLayout(
                engine=engine,
                kv_format=stored,
                block_size=real_size,
                block_bytes=block_bytes,
                groups=groups,
                max_num_batched_tokens=max_num_batched_tokens,
                is_flat=is_flat,
                is_counted_by_concurrency=engine == "vllm" and version >= _TOKENS_BY_CONCURRENCY_SINCE,
                sequence_ranks=decode_context_parallel_size,
            )
        )
    return max(layouts, key=lambda layout: layout.token_bytes)


def layer_cost(layer: Layer, stored: KVFormat, *, tensor_parallel_size: int = 1, expanded_heads: int = 0) -> LayerCost:
    """Return what one layer costs on one device.

    Args:
        expanded_heads: If not 0, latent layers are cached as so many full heads, each padded to 256 elements.
    """
    kv, state = layer.kv, layer.state
    token_bytes = state_bytes = 0
    if kv is not None and kv.kind == "latent" and expanded_heads:
        heads = cdiv(expanded_heads, tensor_parallel_size)
        token_bytes = 2 * heads * stored.head_bytes(_round_up_dim(kv.expanded_dim))
    elif kv is not None:
        heads = kv.num_kv_heads if kv.kind == "latent" else cdiv(kv.num_kv_heads, tensor_parallel_size)
        token_bytes = stored.layer_bytes(kv, num_heads=heads)
    if state is not None:
        state_bytes = 2 * cdiv(state.conv_elements, tensor_parallel_size)
        state_bytes += (4 if state.is_wide else 2) * cdiv(state.recurrent_elements, tensor_parallel_size)
    return LayerCost(
        kind="state" if state is not None else kv.kind if kv is not None else "none",
        window=kv.window if kv is not None else None,
        token_bytes=token_bytes,
        state_bytes=state_bytes,
    )


def pipeline_stages(num_layers: int, num_stages: int) -> tuple[Sequence[int], ...]:
    """Cut layers into stages as vLLM does: as even as they go, the layers over in the stages before the last."""
    counts = [num_layers // num_stages] * num_stages
    for turn in range(num_layers % num_stages):
        counts[-2 - turn if num_stages > 1 else 0] += 1
    stages, first = [], 0
    for count in counts:
        stages.append(range(first, first + count))
        first += count
    return tuple(stages)


def _round_up_dim(dim: int) -> int:
    return cdiv(dim, _EXPANDED_PADDED_TO) * _EXPANDED_PADDED_TO
