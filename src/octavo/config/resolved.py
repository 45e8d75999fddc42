"""ResolvedConfig: every number an engine starts with, and why it is that number.

`EngineConfig` is what was asked; `planner/resolve.py` turns it, with the facts of model and machine, into this. Nothing
is left open and nobody writes to it: starting from the same resolved config gives the same engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.config.engine import InstructionSet, KVAllocator, KVDtype, RunnerName, SchedulingPolicy, WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The decided values of `EngineConfig`, and the memory they take.

    Args:
        model: As asked: alias, path or hub id.
        attention_window, attention_sinks: What is put over a model without windows; both `None` if nothing is.
        num_blocks: Usable blocks; the pool holds the null block besides.
        seed: For drawing the seeds of unseeded requests; `None` draws from the system.
        kv_pool_bytes: Size of the pool, null block included.
        available_bytes: What the engine as a whole may take: the machine's, or `--memory` x `--utilization`.
        weight_bytes, activation_bytes, overhead_bytes: The rest of the sum; overhead is the process itself.
        max_request_blocks: Blocks that one request of `max_model_len` tokens holds, over all groups.
        reasons: For each value that was not simply asked for, why it is what it is.
    """

    model: str
    runner: RunnerName
    threads: int
    instruction_set: InstructionSet = "auto"
    seed: int | None
    weight_dtype: Literal["stored"] | WeightDtype
    kv_cache_dtype: KVDtype
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    sparse_blocks: int = 0
    attention_window: int | None = None
    attention_sinks: int | None = None
    kv_allocator: KVAllocator
    kv_prefault: bool
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    scheduling_policy: SchedulingPolicy
    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    overhead_bytes: int
    block_bytes: int
    kv_pool_bytes: int
    max_request_blocks: int
    reasons: Mapping[str, str] = field(hash=False)

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that the pool holds at once."""
        return self.num_blocks / self.max_request_blocks

    @property
    def pool_tokens(self) -> int:
        """Tokens that the usable blocks hold."""
        return self.num_blocks * self.block_size

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**values, "reasons": dict(self.reasons)}
