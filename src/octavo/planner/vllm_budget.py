"""How vLLM spends a device's memory: rules fitted on its start-up logs, by release.

vLLM measures its activation peak when it starts: a forward pass over `max_num_batched_tokens` tokens, then the sampler
over `max_num_seqs` rows of logits. The larger of the two counts.
"""

from __future__ import annotations

from octavo.planner.engine_budget import BudgetCase, EngineBudget
from octavo.planner.engine_version import EngineVersion
from octavo.planner.estimate import Estimate, around, remainder
from octavo.units import GIB

NEWEST = EngineVersion(0, 19)
"""The newest release that the rules were fitted on, and what is planned for when none is named."""

_LEAN_SAMPLER = EngineVersion(0, 17)
_GRAPHS_INSIDE = EngineVersion(0, 21)
_V1 = EngineVersion(0, 8)


def vllm_budget(case: BudgetCase) -> EngineBudget:
    """Return how vLLM will spend one device's memory."""
    settings, version = case.settings, case.version
    utilization = 0.9 if settings.utilization is None else settings.utilization
    num_batched, num_seqs = _limits(case)
    usable = Estimate(
        low_bytes=int(case.visible.low_bytes * utilization),
        value_bytes=int(case.visible.value_bytes * utilization),
        high_bytes=int(case.visible.high_bytes * utilization),
        source=f"{case.visible.source}, x {utilization:g}",
    )
    activation = _activation(case, num_seqs=num_seqs)
    overhead = _overhead(case)
    graphs = around(0.0 if settings.is_eager else 0.9 * GIB, below=0.4 * GIB, above=1.1 * GIB, source="vLLM logs, 2026")
    inside = version >= _GRAPHS_INSIDE
    return EngineBudget(
        engine="vllm",
        version=version,
        utilization=utilization,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched,
        block_size=settings.block_size or 16,
        usable=usable,
        weights=case.weights,
        activation=activation,
        overhead=overhead,
        graphs=graphs,
        graphs_inside=inside,
        kv_pool=remainder(
            usable,
            case.weights,
            activation,
            overhead,
            *((graphs,) if inside else ()),
            source="usable memory - the rest",
        ),
    )


def _limits(case: BudgetCase) -> tuple[int, int]:
    """Return (max_num_batched_tokens, max_num_seqs) as vLLM resolves them."""
    settings = case.settings
    is_large = case.device.gets_large_batches if case.device else case.visible.value_bytes >= 70 * GIB
    num_batched = settings.max_num_batched_tokens or (8192 if is_large else 2048)
    num_seqs = settings.max_num_seqs or (1024 if is_large else 256)
    return num_batched, min(num_seqs, num_batched)


def _activation(case: BudgetCase, *, num_seqs: int) -> Estimate:
    per_logit = 14.3 if case.version >= _LEAN_SAMPLER else 38.5
    sampler = per_logit * num_seqs * case.forward.vocab_size + 0.14 * GIB
    peak = max(0.78 * GIB, sampler) + (0.35 * GIB if case.forward.is_mixture else 0)
    return around(peak, below=0.1 * peak, above=0.1 * peak, source="rule of 2026-11 on vLLM 0.15 to 0.19 logs")


def _overhead(case: BudgetCase) -> Estimate:
    if case.settings.tensor_parallel_size == 1:
        return around(0.25 * GIB, below=0.1 * GIB, above=0.25 * GIB, source="rule of 2026-11 on vLLM 0.19 logs")
    return around(2.1 * GIB, below=0.1 * GIB, above=0.2 * GIB, source="rule of 2026-11 on vLLM 0.19 logs, NCCL")
