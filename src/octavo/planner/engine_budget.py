"""EngineBudget: how another engine will spend a device's memory, term by term, each with its interval and source.

    KV pool = visible memory x utilisation - weights - activation peak - overhead - CUDA graphs (where they count)

What one engine takes for each term is in a file of its own (`vllm_budget.py`, `sglang_budget.py`): rules fitted on
start-up logs, with the releases they hold for. `engine_rules.py` chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.planner.devices import Device
from octavo.planner.engine_version import EngineVersion
from octavo.planner.estimate import Estimate
from octavo.planner.forward_shape import ForwardShape

OtherEngine = Literal["vllm", "sglang"]
WeightsFrom = Literal["config", "files", "log"]
"""Where weights were counted: a config does not size a vision tower; a log states what was loaded, all included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a person asks of another engine; `None` is that engine's own default.

    Args:
        utilization: `--gpu-memory-utilization` of vLLM, `--mem-fraction-static` of SGLang.
        max_num_seqs: SGLang calls it `--max-running-requests`.
        max_num_batched_tokens: SGLang calls it `--chunked-prefill-size`.
        max_model_len: The longest request, prompt and answer.
        is_eager: No CUDA graphs.
    """

    max_model_len: int
    utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    is_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBudget:
    """The memory of one device of the group, as another engine will spend it.

    Args:
        version: The release whose rules were used.
        utilization, max_num_seqs, max_num_batched_tokens, block_size: As that engine resolves them.
        usable: What the engine may take: visible memory x utilisation.
        graphs: CUDA graphs; part of `usable` only where `graphs_inside`.
        kv_pool: What is left; negative where the rest does not fit.
        notes: What to beware of with this release and these settings.
    """

    engine: OtherEngine
    version: EngineVersion
    utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    usable: Estimate
    weights: Estimate
    activation: Estimate
    overhead: Estimate
    graphs: Estimate
    graphs_inside: bool
    kv_pool: Estimate
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCase:
    """Everything a rule may look at.

    Args:
        weights: Bytes of one device's share of the weights.
        visible: What the engine sees of the device's memory.
    """

    device: Device | None
    visible: Estimate
    forward: ForwardShape
    weights: Estimate
    settings: EngineSettings
    version: EngineVersion
