"""VllmEra: what changed between releases of vLLM in how much memory it takes, with the readings behind each number.

Fitted in November 2026 on start-up logs that are public: 52 runs of 25 models on H100 under 0.15 to 0.19
(jgchn/llm-d-planner, accuracy/results), six under 0.16 or earlier (llm-d-incubation/llm-d-planner, docs), and logs in
issues of vllm-project/vllm. What is fitted is a rule over widths of a model and settings, not a figure per model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from octavo.planner.engine_version import EngineVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadRule:
    """Memory outside PyTorch, in GiB: contexts, libraries, and where devices talk, NCCL's buffers."""

    low_gib: float
    value_gib: float
    high_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEra:
    """Releases from `since` up to the next era's.

    Args:
        sampler_bytes_per_logit: What the sampler holds at once for each of `max_num_seqs` x vocabulary logits: copies
            in both dtypes, sorted values, their indices and sums. Release 0.17 stopped sorting where nobody asked.
        sampler_gib, forward_gib: What either peak has besides.
        alone, together: Overhead of one device, and of a device in a tensor-parallel group of two.
        utilization: Default of `--gpu-memory-utilization`.
        is_chunked: Whether prompts are computed in chunks; if not, the peak was measured on a whole `max_model_len`.
        graphs_inside: Whether CUDA graphs are estimated at the start and taken from the KV pool.
        doubt_share, doubt_gib: How far a real activation peak lies from the rule, as a share and besides.
        source: Releases that were read, and where.
    """

    since: EngineVersion
    sampler_bytes_per_logit: float
    sampler_gib: float
    forward_gib: float
    alone: OverheadRule
    together: OverheadRule
    utilization: float = 0.9
    is_chunked: bool = True
    graphs_inside: bool = False
    doubt_share: float
    doubt_gib: float
    source: str


_V0_SOURCE = "rule of 2026-11 on vLLM 0.2 to 0.7 logs (vllm-project/vllm#10511, #10517, #13882, #15815)"
_V1_SOURCE = "rule of 2026-11 on vLLM 0.15 and 0.16 logs (llm-d-incubation/llm-d-planner, 8 runs on H100)"
_LEAN_SOURCE = "rule of 2026-11 on vLLM 0.17 to 0.19 logs (jgchn/llm-d-planner, 50 runs on H100)"
_NEW_SOURCE = "rule of 2026-11 on vLLM 0.17 to 0.19 logs, carried over to 0.21 and later with wider intervals"

_LONG_SORT = 38.0
_LEAN_SORT = 14.75
# A start of 0.30 took 9.3 B, the releases between are not known: the middle.
_LATEST_SORT = 12.0

_ERAS = (
    VllmEra(
        since=EngineVersion(0, 0),
        sampler_bytes_per_logit=_LONG_SORT,
        sampler_gib=0.05,
        forward_gib=0.0,
        alone=OverheadRule(low_gib=0.05, value_gib=0.4, high_gib=1.9),
        # Early releases counted NCCL's memory and then some: 13.6 GiB on each of four A100 (vllm-project/vllm#2031).
        together=OverheadRule(low_gib=0.2, value_gib=2.0, high_gib=14.0),
        is_chunked=False,
        doubt_share=0.08,
        doubt_gib=0.15,
        source=_V0_SOURCE,
    ),
    VllmEra(
        since=EngineVersion(0, 4),
        sampler_bytes_per_logit=_LONG_SORT,
        sampler_gib=0.05,
        forward_gib=0.0,
        alone=OverheadRule(low_gib=0.05, value_gib=0.4, high_gib=1.9),
        together=OverheadRule(low_gib=0.2, value_gib=1.0, high_gib=3.8),
        is_chunked=False,
        doubt_share=0.08,
        doubt_gib=0.15,
        source=_V0_SOURCE,
    ),
    VllmEra(
        since=EngineVersion(0, 8),
        sampler_bytes_per_logit=_LONG_SORT,
        sampler_gib=0.05,
        forward_gib=0.05,
        alone=OverheadRule(low_gib=0.02, value_gib=0.14, high_gib=0.5),
        together=OverheadRule(low_gib=0.2, value_gib=0.55, high_gib=2.2),
        doubt_share=0.03,
        doubt_gib=0.08,
        source=_V1_SOURCE,
    ),
    VllmEra(
        since=EngineVersion(0, 17),
        sampler_bytes_per_logit=_LEAN_SORT,
        sampler_gib=0.01,
        forward_gib=0.08,
        alone=OverheadRule(low_gib=0.1, value_gib=0.14, high_gib=0.5),
        together=OverheadRule(low_gib=0.5, value_gib=2.0, high_gib=2.3),
        doubt_share=0.02,
        doubt_gib=0.06,
        source=_LEAN_SOURCE,
    ),
    VllmEra(
        since=EngineVersion(0, 18),
        sampler_bytes_per_logit=_LEAN_SORT,
        sampler_gib=0.01,
        forward_gib=0.08,
        alone=OverheadRule(low_gib=0.2, value_gib=0.25, high_gib=0.5),
        together=OverheadRule(low_gib=1.95, value_gib=2.09, high_gib=2.25),
        doubt_share=0.02,
        doubt_gib=0.06,
        source=_LEAN_SOURCE,
    ),
    VllmEra(
        since=EngineVersion(0, 21),
        sampler_bytes_per_logit=_LEAN_SORT,
        sampler_gib=0.01,
        forward_gib=0.08,
        alone=OverheadRule(low_gib=0.1, value_gib=0.25, high_gib=1.0),
        together=OverheadRule(low_gib=0.3, value_gib=1.3, high_gib=2.6),
        graphs_inside=True,
        doubt_share=0.1,
        doubt_gib=0.3,
        source=_NEW_SOURCE,
    ),
    VllmEra(
        since=EngineVersion(0, 25),
        sampler_bytes_per_logit=_LATEST_SORT,
        sampler_gib=0.01,
        forward_gib=0.08,
        alone=OverheadRule(low_gib=0.1, value_gib=0.25, high_gib=1.0),
        together=OverheadRule(low_gib=0.3, value_gib=1.3, high_gib=2.6),
        utilization=0.92,
        graphs_inside=True,
        doubt_share=0.15,
        doubt_gib=0.3,
        source=_NEW_SOURCE,
    ),
)


def vllm_era(version: EngineVersion) -> VllmEra:
    """Return the era of a release."""
    return tuple(takewhile(lambda era: era.since <= version, _ERAS))[-1]
