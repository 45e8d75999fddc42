"""How SGLang spends a device's memory: one share of it holds weights and KV pool, the rest is left for all else.

    KV pool = memory free after initialisation x mem_fraction_static - weights

Activations and CUDA graphs come out of what that leaves; nothing is measured at the start, so a share that is too
large fails later, under load.
"""

from __future__ import annotations

from octavo.planner.engine_budget import BudgetCase, EngineBudget
from octavo.planner.engine_version import EngineVersion
from octavo.planner.estimate import around, exact, remainder, share
from octavo.units import GIB, MIB

NEWEST = EngineVersion(0, 5, 4)
"""The newest release that the rules were made for, and what is planned for when none is named."""

_HEURISTIC = EngineVersion(0, 5, 3)
_SOURCE = "rule of 2026-11 on SGLang logs of 2025 (a start-up log of Qwen2.5 32B on four L4)"

# Up to 0.5.2 the default share depended on the size of the tensor-parallel group.
_SHARE_BY_GROUP = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))

# (memory below, in GiB; chunked_prefill_size; largest graph batch with fewer than 4 devices; with 4 and more)
_LIMITS_BY_MEMORY = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)


def sglang_budget(case: BudgetCase) -> EngineBudget:
    """Return how SGLang will spend one device's memory."""
    settings = case.settings
    chunk, graph_batch = _limits(case)
    chunk = settings.max_num_batched_tokens or chunk
    utilization = settings.utilization
    if utilization is None:
        utilization = _default_share(case, chunk=chunk, graph_batch=graph_batch)
    usable = share(case.visible, utilization)
    group = settings.tensor_parallel_size * settings.pipeline_parallel_size
    overhead = around(
        (0.45 if group == 1 else 0.6) * GIB * utilization,
        below=0.35 * GIB,
        above=(0.5 if group == 1 else 1.5) * GIB,
        source=_SOURCE,
    )
    outside = "outside the budget: what the static share leaves is for activations and CUDA graphs"
    return EngineBudget(
        engine="sglang",
        version=case.version,
        utilization=utilization,
        max_num_seqs=settings.max_num_seqs or graph_batch,
        max_num_batched_tokens=chunk,
        block_size=settings.block_size or 1,
        usable=usable,
        weights=case.weights,
        activation=exact(0, source=outside),
        overhead=overhead,
        graphs=exact(0, source=outside),
        graphs_inside=False,
        kv_pool=remainder(usable, case.weights, overhead, source="usable memory - weights - overhead"),
        notes=("SGLang measures nothing at the start: a static share that is too large fails later, under load",),
    )


def _limits(case: BudgetCase) -> tuple[int, int]:
    """Return (chunked_prefill_size, largest batch of a CUDA graph) by the device's memory."""
    memory_gib = case.visible.value_bytes / GIB
    _, chunk, few, many = next(row for row in _LIMITS_BY_MEMORY if memory_gib < row[0])
    return chunk, many if case.settings.tensor_parallel_size >= 4 else few


def _default_share(case: BudgetCase, *, chunk: int, graph_batch: int) -> float:
    """Return the default of `--mem-fraction-static` (since 0.5.3: sgl-project/sglang#10975)."""
    settings = case.settings
    if case.version < _HEURISTIC:
        group = settings.tensor_parallel_size
        return next(ratio for size, ratio in _SHARE_BY_GROUP if group >= size)
    memory_mib = case.visible.value_bytes / MIB
    reserved_mib = 512 + 1.5 * max(chunk, 2048) + 2 * graph_batch
    reserved_mib += settings.tensor_parallel_size * settings.pipeline_parallel_size / 8 * 1024
    if memory_mib > 60 * 1024:
        reserved_mib = max(reserved_mib, 10 * 1024)
    # Where steps are too large for the device nothing is left for weights, and SGLang refuses to start.
    return max(0.0, round((memory_mib - reserved_mib) / memory_mib, 3))
