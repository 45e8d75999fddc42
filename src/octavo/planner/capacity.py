"""What fits: the memory there is, the KV pool in it, and the longest request in the pool.

    available - weights - activations - overhead = room for the KV pool

Where something does not fit, the error names the value that would, and that value works.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.engine import EngineConfig
from octavo.config.machine import Machine
from octavo.errors import CapacityError
from octavo.planner.memory import KVShape
from octavo.planner.pool import pool_bytes, usable_blocks
from octavo.units import GIB, MIB, cdiv, format_bytes

MAX_DEFAULT_POOL_BYTES = 4 * GIB
DEFAULT_UTILIZATION = 0.9
_MORE_MEMORY = "give it more memory, or use a smaller model or `--weight-dtype`"
_SHORTER_REQUESTS = "give it more memory, or ask for a shorter `--max-model-len`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What an engine may take as a whole, and what is spoken for before the KV pool."""

    available_bytes: int
    because: str
    weight_bytes: int
    activation_bytes: int
    overhead_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def room_bytes(self) -> int:
        """What the KV pool may take; negative when even the rest does not fit."""
        return self.available_bytes - self.fixed_bytes

    @property
    def sum_text(self) -> str:
        return (
            f"{format_bytes(self.available_bytes)} ({self.because}) - weights {format_bytes(self.weight_bytes)}"
            f" - activations {format_bytes(self.activation_bytes)} - overhead {format_bytes(self.overhead_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableMemory:
    """How much of the machine an engine may take.

    Args:
        real_bytes: What this process can have.
        whole_bytes: What it was given: the same, or `--memory`.
        usable_bytes: The part of it that is really used.
    """

    real_bytes: int
    whole_bytes: int
    usable_bytes: int
    utilization: float
    because: str


def usable_memory(config: EngineConfig, machine: Machine) -> UsableMemory:
    """Decide how much of the machine an engine may take."""
    # What this process already holds is part of its overhead, so it counts as available too.
    real_bytes = machine.available_bytes + machine.resident_bytes
    whole = real_bytes if config.memory is None else config.memory
    utilization = config.utilization or (1.0 if config.memory is None else DEFAULT_UTILIZATION)
    because = machine.available_because if config.memory is None else f"--memory {format_bytes(config.memory)}"
    if utilization != 1.0:
        because += f" x {utilization:g}"
    return UsableMemory(
        real_bytes=real_bytes,
        whole_bytes=whole,
        usable_bytes=int(whole * utilization),
        utilization=utilization,
        because=because,
    )


def make_budget(
    config: EngineConfig,
    machine: Machine,
    shape: KVShape,
    *,
    weight_bytes: int,
    activation_bytes: int,
    overhead_bytes: int,
    request_blocks: int,
) -> Budget:
    """Decide what the engine may take.

    Args:
        request_blocks: What the shortest request that must fit takes, for the hints.

    Raises:
        CapacityError: more is asked than the machine has, or too little is left for the smallest KV pool.
    """
    memory = usable_memory(config, machine)
    real_bytes, utilization, because = memory.real_bytes, memory.utilization, memory.because
    budget = Budget(
        available_bytes=memory.usable_bytes,
        because=because,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        overhead_bytes=overhead_bytes,
    )
    # What starts is the pool that was asked for, or else one request; no memory helps a pool too small for a request.
    asked_blocks = _asked_blocks(config, shape)
    enough_blocks = request_blocks if asked_blocks is None else asked_blocks
    enough_bytes = budget.fixed_bytes + pool_bytes(enough_blocks, shape.block_bytes)
    can_start = enough_blocks >= request_blocks
    if budget.available_bytes > real_bytes:
        most_mib = int(real_bytes / utilization) // MIB
        is_enough = can_start and enough_bytes <= int(most_mib * MIB * utilization) <= real_bytes
        raise CapacityError(
            f"{format_bytes(budget.available_bytes)} of memory asked, {format_bytes(real_bytes)} available",
            because=f"{because}; this process can have {machine.available_because}",
            hints=(f"`--memory {most_mib}MiB` is the most" if is_enough else _MORE_MEMORY,),
        )
    least_pool_bytes = pool_bytes(1, shape.block_bytes)
    if budget.room_bytes < least_pool_bytes:
        least_bytes = budget.fixed_bytes + least_pool_bytes
        hint = _MORE_MEMORY
        least_mib = int(enough_bytes / utilization) // MIB + 1
        if config.memory is not None and can_start and int(least_mib * MIB * utilization) <= real_bytes:
            hint = f"`--memory {least_mib}MiB` is the least"
        raise CapacityError(
            f"{format_bytes(least_bytes)} needed for the smallest KV pool and all else,"
            f" {format_bytes(budget.available_bytes)} available",
            because=f"weights {format_bytes(weight_bytes)} + activations {format_bytes(activation_bytes)} + overhead"
            f" {format_bytes(overhead_bytes)} + two blocks of {format_bytes(shape.block_bytes)}; there is {because}",
            hints=(hint,),
        )
    return budget


def size_pool(
    config: EngineConfig, shape: KVShape, budget: Budget, *, request_blocks: int, most_blocks: int
) -> tuple[int, str]:
    """Decide the usable blocks of the KV pool, and say why.

    Args:
        request_blocks: What the shortest request that must fit takes, for the hints.
        most_blocks: What the limits can use: all requests of a step at full length.

    Raises:
        CapacityError: the pool that was asked does not fit, or not even one block does.
    """
    asked_blocks = _asked_blocks(config, shape)
    if asked_blocks is not None:
        is_counted = config.num_blocks is not None
        why = "asked" if is_counted else f"what --kv-cache-memory {format_bytes(config.kv_cache_memory or 0)} holds"
        return _checked(asked_blocks, shape, budget, request_blocks=request_blocks, is_counted=is_counted), why
    room_blocks = usable_blocks(budget.room_bytes, shape.block_bytes)
    choices = [(room_blocks, f"what {budget.sum_text} leaves")]
    if config.memory is None and config.utilization is None:
        # Nobody said how much, so leave room for what else runs here.
        half = budget.room_bytes // 2
        choices = [
            (usable_blocks(MAX_DEFAULT_POOL_BYTES, shape.block_bytes), "4 GiB, the most that is taken unasked"),
            (usable_blocks(half, shape.block_bytes), f"half of the {format_bytes(2 * half)} free after the weights"),
        ]
    choices.append((most_blocks, "all that the most running requests of the greatest length can use"))
    num_blocks, why = min(choices, key=lambda choice: choice[0])
    return _checked(num_blocks, shape, budget, request_blocks=request_blocks), why


def longest_request(
    config: EngineConfig,
    shape: KVShape,
    budget: Budget,
    *,
    num_blocks: int,
    why_num_blocks: str,
    length_limit: int,
    max_num_batched_tokens: int,
) -> int:
    """Return the most tokens of one request: the limit, or what the pool holds if nobody asked for a length.

    Raises:
        CapacityError: the length that was asked for does not fit.
    """
    longest = shape.longest_tokens(num_blocks, max_num_batched_tokens=max_num_batched_tokens, limit=length_limit)
    if longest == length_limit or (config.max_model_len is None and longest >= 1):
        return longest
    needed_blocks = shape.blocks_for_tokens(length_limit, max_num_batched_tokens=max_num_batched_tokens)
    needed_bytes = pool_bytes(needed_blocks, shape.block_bytes)
    hints = []
    if longest >= 1:
        blocks_text = f"{num_blocks:,} blocks of {shape.block_size} tokens"
        hints.append(f"`--max-model-len {longest}` is the longest that fits ({blocks_text})")
    if needed_blocks <= usable_blocks(budget.room_bytes, shape.block_bytes):
        flag = f"--num-blocks {needed_blocks}"
        if config.num_blocks is None:
            flag = f"--kv-cache-memory {_size_text(needed_bytes, budget)}"
        hints.append(f"`{flag}` holds one request of {length_limit:,} tokens")
    raise CapacityError(
        f"one request of {length_limit:,} tokens needs {format_bytes(needed_bytes)} of KV cache,"
        f" the pool has {format_bytes(pool_bytes(num_blocks, shape.block_bytes))}",
        because=f"{length_limit:,} tokens take {needed_blocks:,} blocks of {format_bytes(shape.block_bytes)}, and"
        f" there is a null block; the pool has {num_blocks:,} usable ones ({why_num_blocks})",
        hints=tuple(hints) or ("give the KV pool more memory",),
    )


def _asked_blocks(config: EngineConfig, shape: KVShape) -> int | None:
    """Return the usable blocks of the pool that was asked for; `None` when none was."""
    if config.num_blocks is None and config.kv_cache_memory is not None:
        return usable_blocks(config.kv_cache_memory, shape.block_bytes)
    return config.num_blocks


def _checked(num_blocks: int, shape: KVShape, budget: Budget, *, request_blocks: int, is_counted: bool = False) -> int:
    most = usable_blocks(budget.room_bytes, shape.block_bytes)
    if 1 <= num_blocks <= most:
        return num_blocks
    if num_blocks >= 1:
        needed = pool_bytes(num_blocks, shape.block_bytes)
        raise CapacityError(
            f"a KV pool of {num_blocks:,} blocks needs {format_bytes(needed)},"
            f" {format_bytes(budget.room_bytes)} available",
            because=f"{budget.sum_text} leaves {format_bytes(budget.room_bytes)}",
            hints=(
                _most_that_fits(most, shape, budget, request_blocks=request_blocks, is_counted=is_counted)
                if request_blocks <= most
                else _SHORTER_REQUESTS,
            ),
        )
    # The smallest pool fits (`make_budget`), so it was asked too small, or half of the room was.
    enough_bytes = pool_bytes(request_blocks, shape.block_bytes)
    hint = _SHORTER_REQUESTS
    if request_blocks <= most:
        hint = f"`--kv-cache-memory {_size_text(enough_bytes, budget)}` is enough"
    raise CapacityError(
        f"a KV pool needs at least {format_bytes(pool_bytes(1, shape.block_bytes))}, there is less",
        because=f"a block takes {format_bytes(shape.block_bytes)}, and the pool holds a null block besides one to use",
        hints=(hint,),
    )


def _most_that_fits(most: int, shape: KVShape, budget: Budget, *, request_blocks: int, is_counted: bool) -> str:
    if is_counted:
        return f"`--num-blocks {most}` is the most"
    room_mib = budget.room_bytes // MIB
    is_enough = usable_blocks(room_mib * MIB, shape.block_bytes) >= request_blocks
    return f"`--kv-cache-memory {f'{room_mib}MiB' if is_enough else f'{budget.room_bytes}B'}` is the most"


def _size_text(num_bytes: int, budget: Budget) -> str:
    """Print a size that is at least so much and fits: in whole MiB where there is room for that."""
    num_mib = cdiv(num_bytes, MIB)
    return f"{num_mib}MiB" if num_mib * MIB <= budget.room_bytes else f"{num_bytes}B"
