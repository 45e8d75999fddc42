"""How vLLM spends a device's memory, from a model's widths, its own defaults, and the rules of `vllm_eras.py`.

At the start vLLM runs a step of `max_num_batched_tokens` tokens, then its sampler on `max_num_seqs` rows of logits,
while the step's hidden states, the experts' buffers and the images' features are still held. The larger peak counts:

    forward  2 B x batched tokens x (3 x MLP width / TP + 3 x hidden size), 2 x where the MLP has no gate
    sampler  14.75 B (38 B before 0.17) x sequences x vocabulary + 2 B x batched tokens x hidden size
    both     + buffers of experts (not divided by their TP where the hidden size is wider) + features of images
"""

from __future__ import annotations

from octavo.planner.engine_budget import BudgetCase, EngineBudget
from octavo.planner.engine_version import EngineVersion
from octavo.planner.estimate import Estimate, around, exact, remainder, share
from octavo.planner.vllm_eras import VllmEra, vllm_era
from octavo.units import GIB, MIB

NEWEST = EngineVersion(0, 19)
"""The newest release that the rules were fitted on, and what is planned for when none is named."""

_ELEMENT_BYTES = 2
# A prompt is computed in chunks from this length on, before all were; releases up to 0.6 in chunks of 512.
_LONG_PROMPT = 32768
# Kernels of experts take no more tokens at once.
_EXPERT_TOKENS = 32768


def vllm_budget(case: BudgetCase) -> EngineBudget:
    """Return how vLLM will spend one device's memory."""
    era = vllm_era(case.version)
    settings = case.settings
    utilization = era.utilization if settings.utilization is None else settings.utilization
    num_batched = _num_batched_tokens(case, era)
    num_seqs = min(settings.max_num_seqs or (1024 if _is_large(case, era) else 256), num_batched)
    usable = share(case.visible, utilization)
    activation = _activation(case, era, num_batched=num_batched, num_seqs=num_seqs)
    overhead = _overhead(case, era)
    graphs = _graphs(case, era)
    counted = (case.weights, activation, overhead, *((graphs,) if era.graphs_inside else ()))
    return EngineBudget(
        engine="vllm",
        version=case.version,
        utilization=utilization,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_batched,
        block_size=settings.block_size or 16,
        usable=usable,
        weights=case.weights,
        activation=activation,
        overhead=overhead,
        graphs=graphs,
        graphs_inside=era.graphs_inside,
        kv_pool=remainder(usable, *counted, source="usable memory - weights - activation peak - overhead"),
        notes=_notes(case, era, usable, graphs),
    )


def _is_large(case: BudgetCase, era: VllmEra) -> bool:
    """Say whether larger defaults hold: 70 GiB or more and no A100, since 0.8 (vllm-project/vllm#17885)."""
    if not era.is_chunked:
        return False
    return case.device.gets_large_batches if case.device else case.visible.value_bytes >= 70 * GIB


def _num_batched_tokens(case: BudgetCase, era: VllmEra) -> int:
    asked = case.settings.max_num_batched_tokens
    if asked is not None:
        return asked
    if era.is_chunked:
        return 8192 if _is_large(case, era) else 2048
    if case.settings.max_model_len > _LONG_PROMPT:
        return 512 if case.version < EngineVersion(0, 7) else 2048
    return max(case.settings.max_model_len, 2048)


def _activation(case: BudgetCase, era: VllmEra, *, num_batched: int, num_seqs: int) -> Estimate:
    model, tp = case.forward, case.settings.tensor_parallel_size
    row_bytes = _ELEMENT_BYTES * num_batched
    mlp_rows = 3 if model.is_gated else 2
    forward = row_bytes * (mlp_rows * model.mlp_width / tp + 3 * model.hidden_size) + era.forward_gib * GIB
    sampler = (
        era.sampler_bytes_per_logit * num_seqs * model.vocab_size
        + row_bytes * model.hidden_size
        + era.sampler_gib * GIB
    )
    experts = _expert_buffer_bytes(case, num_batched=num_batched)
    images = (row_bytes * model.hidden_size + 90 * MIB) if model.sees_images else 0.0
    peak = max(forward, sampler) + experts + images
    doubt = era.doubt_gib * GIB + era.doubt_share * peak + 0.25 * experts + 0.6 * images
    # Images of the largest size that a model takes may need more than any text; what they need is the model's own.
    unseen = 0.6 * GIB if model.sees_images else 0.0
    # Nor was a hybrid's start under a fitted release read: scans and convolutions hold wider rows than attention.
    unseen += 0.15 * peak if model.has_states else 0.0
    if model.sees_images and not era.is_chunked:
        # The first engine tried one image for each sequence: 36.6 GiB for 128 (vllm-project/vllm#12126).
        unseen = 0.15 * GIB * num_seqs
        peak, doubt = peak + unseen, doubt + unseen
    return around(peak, below=doubt, above=doubt + unseen, source=era.source)


def _expert_buffer_bytes(case: BudgetCase, *, num_batched: int) -> float:
    """Return what stays allocated for experts' inner and outer rows, and for the latent rows of long prompts."""
    model, tp = case.forward, case.settings.tensor_parallel_size
    num_bytes = 0.0
    if model.is_mixture and model.has_expert_buffers:
        width = model.expert_width / tp
        rows = min(num_batched, _EXPERT_TOKENS) * model.num_experts_per_token
        num_bytes += _ELEMENT_BYTES * rows * (max(2 * width, model.hidden_size) + width)
    if model.latent_width:
        num_bytes += _ELEMENT_BYTES * min(8 * case.settings.max_model_len, 65536) * model.latent_width
    return num_bytes


def _overhead(case: BudgetCase, era: VllmEra) -> Estimate:
    settings = case.settings
    tensor, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    rule = era.alone if tensor == 1 else era.together
    low, value, high = rule.low_gib, rule.value_gib, rule.high_gib
    # Each doubling of the group was seen to add about 0.1 GiB, up to four devices; beyond, it is a guess.
    doublings = max(0, tensor.bit_length() - 2)
    value, high = value + 0.1 * doublings, high + 0.1 * doublings * (doublings + 1)
    if stages > 1 and tensor == 1:
        # Stages hand rows on, for which a smaller part of the group's buffers is needed; no such log was read.
        value, high = (era.alone.value_gib + era.together.value_gib) / 2, max(high, era.together.high_gib)
    return around(value * GIB, below=(value - low) * GIB, above=(high - value) * GIB, source=era.source)


def _graphs(case: BudgetCase, era: VllmEra) -> Estimate:
    if case.settings.is_eager:
        return exact(0, source="no CUDA graphs: eager mode")
    layers = case.forward.num_layers
    if era.graphs_inside:
        # Estimates printed by 0.21 and later are smaller than what 0.19 was seen to take (gpustack/runner#251).
        return around(0.5 * GIB, below=0.35 * GIB, above=1.2 * GIB, source="vLLM 0.21 to 0.27 logs, 2026")
    value = 0.45 + 0.0125 * layers + (0.4 if case.forward.is_mixture else 0)
    return around(
        value * GIB,
        below=0.35 * GIB,
        above=0.8 * GIB,
        source="rule of 2026-11 on vLLM 0.19 logs: 0.45 GiB + 12.8 MiB a layer, + 0.4 GiB for mixtures",
    )


def _notes(case: BudgetCase, era: VllmEra, usable: Estimate, graphs: Estimate) -> tuple[str, ...]:
    notes = []
    outside = case.visible.value_bytes - usable.value_bytes
    if not era.graphs_inside and graphs.value_bytes > outside:
        notes.append(
            "CUDA graphs are taken after the KV pool, and are likely to need more than the utilisation leaves:"
            " expect an out-of-memory error at the start; lower the utilisation"
        )
    if not case.settings.is_eager and era.since >= EngineVersion(0, 21):
        notes.append("CUDA graphs are estimated at the start and shrink the KV pool since release 0.21")
    return tuple(notes)
