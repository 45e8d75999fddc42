"""How SGLang spends a device's memory: one share of it holds weights and KV pool, the rest is left for all else."""

from __future__ import annotations

from octavo.planner.engine_budget import BudgetCase, EngineBudget
from octavo.planner.engine_version import EngineVersion
from octavo.planner.estimate import Estimate, around, remainder
from octavo.units import GIB

NEWEST = EngineVersion(0, 5, 4)
"""The newest release that the rules were made for, and what is planned for when none is named."""


def sglang_budget(case: BudgetCase) -> EngineBudget:
    """Return how SGLang will spend one device's memory."""
    settings = case.settings
    utilization = 0.88 if settings.utilization is None else settings.utilization
    usable = Estimate(
        low_bytes=int(case.visible.low_bytes * utilization),
        value_bytes=int(case.visible.value_bytes * utilization),
        high_bytes=int(case.visible.high_bytes * utilization),
        source=f"{case.visible.source}, x {utilization:g}",
    )
    overhead = around(0.5 * GIB, below=0.5 * GIB, above=1.0 * GIB, source="SGLang logs, 2025")
    rest = case.visible.value_bytes * (1 - utilization)
    activation = around(rest, below=rest, above=0, source="what mem-fraction-static leaves")
    graphs = around(0, below=0, above=0, source="in the part that mem-fraction-static leaves")
    return EngineBudget(
        engine="sglang",
        version=case.version,
        utilization=utilization,
        max_num_seqs=settings.max_num_seqs or 256,
        max_num_batched_tokens=settings.max_num_batched_tokens or 8192,
        block_size=settings.block_size or 1,
        usable=usable,
        weights=case.weights,
        activation=activation,
        overhead=overhead,
        graphs=graphs,
        graphs_inside=False,
        kv_pool=remainder(usable, case.weights, overhead, source="usable memory - weights - overhead"),
    )
