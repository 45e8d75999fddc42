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


def make_budget(
    config: EngineConfig,
    machine: Machine,
    shape: KVShape,
    *,
    weight_bytes: int,
    activation_bytes: int,
    overhead_bytes: int,
) -> Budget:
    """Decide what the engine may take.

    Raises:
        CapacityError: more is asked than the machine has, or too little is left for the smallest KV pool.
    """
    # What this process already holds is part of its overhead, so it counts as available too.
    real_bytes = machine.available_bytes + machine.resident_bytes
    whole = real_bytes if config.memory is None else config.memory
    utilization = config.utilization or (1.0 if config.memory is None else DEFAULT_UTILIZATION)
    because = machine.available_because if config.memory is None else f"--memory {format_bytes(config.memory)}"
    if utilization != 1.0:
        because += f" x {utilization:g}"
    budget = Budget(
        available_bytes=int(whole * utilization),
        because=because,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        overhead_bytes=overhead_bytes,
    )
    if budget.available_bytes > real_bytes:
        raise CapacityError(
            f"{format_bytes(budget.available_bytes)} of memory asked, {format_bytes(real_bytes)} available",
            because=f"{because}; this process can have {machine.available_because}",
            hints=(f"`--memory {int(real_bytes / utilization) // MIB}MiB` is the most",),
        )
    least_pool_bytes = pool_bytes(1, shape.block_bytes)
    if budget.room_bytes < least_pool_bytes:
        least_bytes = budget.fixed_bytes + least_pool_bytes
        hint = "give it more memory, or use a smaller model or `--weight-dtype`"
        if config.memory is not None and least_bytes <= real_bytes:
            hint = f"`--memory {int(least_bytes / utilization) // MIB + 1}MiB` is the least"
        raise CapacityError(
            f"{format_bytes(least_bytes)} needed for the smallest KV pool and all else,"
            f" {format_bytes(budget.available_bytes)} available",
            because=f"weights {format_bytes(weight_bytes)} + activations {format_bytes(activation_bytes)} + overhead"
            f" {format_bytes(overhead_bytes)} + two blocks of {format_bytes(shape.block_bytes)}; there is {because}",
            hints=(hint,),
        )
    return budget


def size_pool(config: EngineConfig, shape: KVShape, budget: Budget, *, most_blocks: int) -> tuple[int, str]:
    """Decide the usable blocks of the KV pool, and say why.

    Args:
        most_blocks: What the limits can use: all requests of a step at full length.

    Raises:
        CapacityError: the pool that was asked does not fit, or not even one block does.
    """
    if config.num_blocks is not None:
        return _checked(config.num_blocks, shape, budget, is_counted=True), "asked"
    if config.kv_cache_memory is not None:
        num_blocks = usable_blocks(config.kv_cache_memory, shape.block_bytes)
        why = f"what --kv-cache-memory {format_bytes(config.kv_cache_memory)} holds"
        return _checked(num_blocks, shape, budget), why
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
    return _checked(num_blocks, shape, budget), why


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
        if config.num_blocks is None and cdiv(needed_bytes, MIB) * MIB <= budget.room_bytes:
            flag = f"--kv-cache-memory {cdiv(needed_bytes, MIB)}MiB"
        hints.append(f"`{flag}` holds one request of {length_limit:,} tokens")
    raise CapacityError(
        f"one request of {length_limit:,} tokens needs {format_bytes(needed_bytes)} of KV cache,"
        f" the pool has {format_bytes(pool_bytes(num_blocks, shape.block_bytes))}",
        because=f"{length_limit:,} tokens take {needed_blocks:,} blocks of {format_bytes(shape.block_bytes)}, and"
        f" there is a null block; the pool has {num_blocks:,} usable ones ({why_num_blocks})",
        hints=tuple(hints) or ("give the KV pool more memory",),
    )


def _checked(num_blocks: int, shape: KVShape, budget: Budget, *, is_counted: bool = False) -> int:
    most = usable_blocks(budget.room_bytes, shape.block_bytes)
    if 1 <= num_blocks <= most:
        return num_blocks
    if num_blocks >= 1:
        needed = pool_bytes(num_blocks, shape.block_bytes)
        raise CapacityError(
            f"a KV pool of {num_blocks:,} blocks needs {format_bytes(needed)},"
            f" {format_bytes(budget.room_bytes)} available",
            because=f"{budget.sum_text} leaves {format_bytes(budget.room_bytes)}",
            hints=(_most_that_fits(most, shape, budget, is_counted=is_counted),),
        )
    # The smallest pool fits (`make_budget`), so it was asked too small, or half of the room was.
    least = pool_bytes(1, shape.block_bytes)
    hint = f"`--num-blocks 1` needs {format_bytes(least)}, and holds {shape.block_size} tokens"
    if cdiv(least, MIB) * MIB <= budget.room_bytes:
        hint = f"`--kv-cache-memory {cdiv(least, MIB)}MiB` is the least in whole MiB"
    raise CapacityError(
        f"a KV pool needs at least {format_bytes(least)}, there is less",
        because=f"a block takes {format_bytes(shape.block_bytes)}, and the pool holds a null block besides one to use",
        hints=(hint,),
    )


def _most_that_fits(most: int, shape: KVShape, budget: Budget, *, is_counted: bool) -> str:
    room_mib = budget.room_bytes // MIB
    if is_counted or usable_blocks(room_mib * MIB, shape.block_bytes) < 1:
        return f"`--num-blocks {most}` is the most"
    return f"`--kv-cache-memory {room_mib}MiB` is the most"
