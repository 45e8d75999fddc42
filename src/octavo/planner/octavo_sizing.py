"""How Octavo divides a machine's memory: by the very code that sizes its pool when it starts.

Where it does not fit, the parts are still told, so that a person sees what is in the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.config.engine import EngineConfig
from octavo.config.machine import Machine
from octavo.config.resolved import ResolvedConfig
from octavo.errors import CapacityError
from octavo.models.spec import ModelSpec
from octavo.planner.capacity import usable_memory
from octavo.planner.estimate import exact
from octavo.planner.memory import (
    KVShape,
    activation_bytes,
    kv_shape,
    layer_token_bytes,
    max_selected_rows,
    overhead_bytes,
)
from octavo.planner.pool import pool_bytes
from octavo.planner.resolve import ModelFacts, Purpose, resolve
from octavo.planner.sizing import GroupCost, Sizing

_OWN_RULES = "the code that sizes the pool at a start"


@dataclass(frozen=True, slots=True, kw_only=True)
class OctavoKVCosts:
    """Implements `KVCosts` with the shape that the pool is made of.

    Args:
        layers: For each kind of layer, by its window, the bytes that a token leaves in each layer of it.
        max_num_batched_tokens: A step may hold so many tokens beside a window.
    """

    shape: KVShape
    layers: Mapping[int | None, Sequence[int]]
    max_num_batched_tokens: int

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def token_bytes(self) -> int:
        return sum(group.token_bytes for group in self.groups)

    @property
    def groups(self) -> tuple[GroupCost, ...]:
        return tuple(self._cost(window, token_bytes) for window, token_bytes in self.layers.items())

    def _cost(self, window: int | None, token_bytes: Sequence[int]) -> GroupCost:
        num_groups = -(-len(token_bytes) // self.shape.layers_per_group)
        return GroupCost(
            name="full attention" if window is None else f"sliding window of {window:,}" + self._sinks(),
            num_layers=len(token_bytes),
            token_bytes=sum(token_bytes),
            block_bytes=num_groups * self.shape.block_bytes,
        )

    def _sinks(self) -> str:
        return f" and {self.shape.num_sinks:,} sinks" if self.shape.num_sinks else ""

    def blocks_for(self, num_tokens: int) -> int:
        return self.shape.blocks_for_tokens(num_tokens, max_num_batched_tokens=self.max_num_batched_tokens)

    def blocks_reserved(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * len(self.shape.windows)

    def blocks_shared(self, num_tokens: int) -> int:
        return num_tokens // self.block_size * sum(window is None for window in self.shape.windows)

    def longest(self, num_blocks: int, limit: int) -> int:
        return self.shape.longest_tokens(num_blocks, max_num_batched_tokens=self.max_num_batched_tokens, limit=limit)

    def pool_tokens(self, num_blocks: int, max_model_len: int) -> int:
        return num_blocks * self.block_size


def size_octavo(config: EngineConfig, machine: Machine, model: ModelFacts, *, purpose: Purpose) -> Sizing:
    """Divide a machine's memory as an engine of this configuration would.

    Raises:
        InvalidParameterError: a value contradicts the model or another value, so that no memory would help.
    """
    resolved, refusal = _try(config, machine, model, purpose)
    free = resolved
    if config.max_model_len is not None:
        # What fits is asked without a length, since a pool is also sized by what its requests can use.
        free, _ = _try(replace(config, max_model_len=None), machine, model, purpose)
    shown = resolved or free
    # Limits of a step do not depend on memory, so they are known even where nothing fits.
    limits = shown or _with_room(config, machine, model, purpose)
    memory = usable_memory(config, machine)
    shape = kv_shape(
        model.spec,
        kv_dtype=limits.kv_cache_dtype,
        block_size=limits.block_size,
        skip_layers=limits.kv_cache_dtype_skip_layers,
    )
    if config.kv_allocator == "reserved":
        shape = shape.without_windows()
    num_rows = max_selected_rows(max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs)
    arena_bytes = activation_bytes(
        model.program, max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs
    )
    spent_bytes = model.weight_bytes + arena_bytes + overhead_bytes(model.spec)
    return Sizing(
        engine="octavo",
        engine_version="",
        memory_bytes=memory.whole_bytes,
        usable_bytes=memory.usable_bytes,
        usable_source=memory.because,
        weights=exact(model.weight_bytes, source=f"every tensor at its size as held: {model.weights_as}"),
        activation=exact(
            arena_bytes,
            source=f"lifetimes of the program's buffers: {limits.max_num_batched_tokens:,} tokens a step,"
            f" {num_rows:,} rows of logits",
        ),
        overhead=exact(
            overhead_bytes(model.spec), source="interpreter, libraries and tokenizer, as measured (2026-11)"
        ),
        pool=exact(
            shown.kv_pool_bytes if shown else _asked_pool(config, shape) or memory.usable_bytes - spent_bytes,
            source=_OWN_RULES + (f": {shown.reasons.get('num_blocks', 'asked')}" if shown else ""),
        ),
        kv=OctavoKVCosts(
            shape=shape,
            layers=_by_window(
                model.spec,
                layer_token_bytes(
                    model.spec,
                    kv_dtype=limits.kv_cache_dtype,
                    block_size=limits.block_size,
                    skip_layers=limits.kv_cache_dtype_skip_layers,
                ),
            ),
            max_num_batched_tokens=limits.max_num_batched_tokens,
        ),
        num_blocks=shown.num_blocks if shown else 0,
        length_limit=config.max_model_len or model.spec.max_position,
        model_limit=model.spec.max_position,
        longest_fitting_len=free.max_model_len if free else 0,
        is_length_asked=config.max_model_len is not None,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_dtype=limits.kv_cache_dtype,
        weights_as=model.weights_as,
        is_caching=limits.enable_prefix_caching,
        is_reserved=config.kv_allocator == "reserved",
        reasons=dict(limits.reasons),
        refusal=refusal,
    )


def _try(
    config: EngineConfig, machine: Machine, model: ModelFacts, purpose: Purpose
) -> tuple[ResolvedConfig | None, CapacityError | None]:
    try:
        return resolve(config, machine, model, purpose=purpose), None
    except CapacityError as error:
        return None, error


def _with_room(config: EngineConfig, machine: Machine, model: ModelFacts, purpose: Purpose) -> ResolvedConfig:
    """Resolve as if memory were no question."""
    # The pool is asked for, too: by default it has a limit, and the blocks of a large model can be larger.
    unsized = replace(config, memory=None, utilization=None, kv_cache_memory=2**59, num_blocks=None, max_model_len=None)
    return resolve(unsized, replace(machine, available_bytes=2**60), model, purpose=purpose)


def _asked_pool(config: EngineConfig, shape: KVShape) -> int | None:
    if config.num_blocks is not None:
        return pool_bytes(config.num_blocks, shape.block_bytes)
    return config.kv_cache_memory


def _by_window(spec: ModelSpec, token_bytes: Sequence[int]) -> dict[int | None, list[int]]:
    if not spec.kv_groups:
        return {None: list(token_bytes)}
    layers: dict[int | None, list[int]] = {}
    for group in spec.kv_groups:
        layers.setdefault(group.window, []).extend(token_bytes[layer] for layer in group.layers)
    return layers
