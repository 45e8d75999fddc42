"""From what was asked to what is done: `resolve` decides every open value of a config, each with its reason.

Pure: the same config, model and machine give the same answer. Choices that need no memory are made here, the sum is
done in `capacity.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.engine import NATIVE_TILE_TOKENS, EngineConfig, InstructionSet, KVDtype, RunnerName
from octavo.config.machine import AVX2_FLAGS, Machine
from octavo.config.resolved import ResolvedConfig
from octavo.errors import InvalidParameterError
from octavo.models.program import Program
from octavo.models.spec import ModelSpec
from octavo.planner.capacity import longest_request, make_budget, size_pool
from octavo.planner.memory import activation_bytes, kv_shape, overhead_bytes
from octavo.planner.pool import pool_bytes

Purpose = Literal["offline", "serving"]

DEFAULT_BATCHED_TOKENS = 512
DEFAULT_NUM_SEQS: dict[Purpose, int] = {"offline": 64, "serving": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the planner must know of a model; all of it comes from headers and configs, none from weights.

    Args:
        weight_bytes: As the loader will hold them.
        weights_as: How the loader will hold them, in words (`q4_1 and q8_0, as stored`).
        native_refusal: Why the native runner cannot take this model on this machine; empty when it can.
    """

    spec: ModelSpec
    program: Program
    weight_bytes: int
    weights_as: str
    native_refusal: str = ""


def resolve(
    config: EngineConfig, machine: Machine, model: ModelFacts, *, purpose: Purpose = "offline"
) -> ResolvedConfig:
    """Decide every value.

    Raises:
        InvalidParameterError: a value contradicts the model (longer than its context) or another value.
        CapacityError: the weights, the pool or one request of the asked length do not fit; hints name what would.
    """
    reasons: dict[str, str] = {"weight_dtype": model.weights_as}
    runner = _runner(config, model, reasons)
    instruction_set = _instruction_set(config, machine, runner, reasons)
    threads = _threads(config, machine, reasons)
    num_seqs, batched_tokens = _step_limits(config, purpose, reasons)
    kv_dtype = _kv_dtype(config, reasons)
    has_prefix_cache = _prefix_cache(config, reasons)
    if config.sparse_blocks is not None:
        reasons["sparse_blocks"] = "lossy: a query reads the tiles that matter most to it, and no others"
    shape = kv_shape(
        model.spec,
        kv_dtype=kv_dtype,
        block_size=config.block_size,
        skip_layers=_skipped_layers(config, model.spec, kv_dtype),
    )
    if config.kv_allocator == "reserved":
        shape = shape.without_windows()
    attention_sinks = _attention_sinks(config, reasons)
    length_limit = _length_limit(config, model.spec, reasons)
    request_blocks = shape.blocks_for_tokens(config.max_model_len or 1, max_num_batched_tokens=batched_tokens)
    budget = make_budget(
        config,
        machine,
        shape,
        weight_bytes=model.weight_bytes,
        activation_bytes=activation_bytes(model.program, max_num_batched_tokens=batched_tokens, max_num_seqs=num_seqs),
        overhead_bytes=overhead_bytes(model.spec),
        request_blocks=request_blocks,
    )
    reasons["available_bytes"] = budget.because
    longest_blocks = shape.blocks_for_tokens(length_limit, max_num_batched_tokens=batched_tokens)
    num_blocks, why_num_blocks = size_pool(
        config, shape, budget, request_blocks=request_blocks, most_blocks=num_seqs * longest_blocks
    )
    if config.num_blocks is None:
        reasons["num_blocks"] = why_num_blocks
    max_model_len = longest_request(
        config,
        shape,
        budget,
        num_blocks=num_blocks,
        why_num_blocks=why_num_blocks,
        length_limit=length_limit,
        max_num_batched_tokens=batched_tokens,
    )
    if max_model_len < length_limit:
        reasons["max_model_len"] = f"what {num_blocks:,} blocks hold; the limit would be {length_limit:,}"
    return ResolvedConfig(
        model=config.model,
        runner=runner,
        threads=threads,
        instruction_set=instruction_set,
        seed=config.seed,
        weight_dtype="stored" if config.weight_dtype == "auto" else config.weight_dtype,
        kv_cache_dtype=kv_dtype,
        kv_cache_dtype_skip_layers=config.kv_cache_dtype_skip_layers,
        sparse_blocks=config.sparse_blocks or 0,
        attention_window=config.attention_window,
        attention_sinks=attention_sinks,
        kv_allocator=config.kv_allocator,
        kv_prefault=config.kv_prefault,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=batched_tokens,
        enable_prefix_caching=has_prefix_cache,
        scheduling_policy=config.scheduling_policy,
        available_bytes=budget.available_bytes,
        weight_bytes=budget.weight_bytes,
        activation_bytes=budget.activation_bytes,
        overhead_bytes=budget.overhead_bytes,
        block_bytes=shape.block_bytes,
        kv_pool_bytes=pool_bytes(num_blocks, shape.block_bytes),
        max_request_blocks=shape.blocks_for_tokens(max_model_len, max_num_batched_tokens=batched_tokens),
        reasons=reasons,
    )


def why_not_native(config: EngineConfig, machine_refusal: str) -> str:
    """Say why the native runner cannot be used; empty if it can.

    Args:
        machine_refusal: Why it cannot on the machine in question, whatever the config.
    """
    if not machine_refusal and config.block_size % NATIVE_TILE_TOKENS:
        return f"native kernels need blocks of a multiple of {NATIVE_TILE_TOKENS} tokens, not {config.block_size}"
    return machine_refusal


def _runner(config: EngineConfig, model: ModelFacts, reasons: dict[str, str]) -> RunnerName:
    refusal = why_not_native(config, model.native_refusal)
    if config.runner == "native" and refusal:
        raise InvalidParameterError(
            "cannot be native", param="runner", because=refusal, hints=("`--runner reference`",)
        )
    if config.runner != "auto":
        return config.runner
    reasons["runner"] = f"the NumPy reference, since {refusal}" if refusal else "C++ kernels, the faster one"
    return "reference" if refusal else "native"


def _instruction_set(
    config: EngineConfig, machine: Machine, runner: RunnerName, reasons: dict[str, str]
) -> InstructionSet:
    """Refuse instructions that this CPU lacks, or that nothing would use."""
    asked = config.instruction_set
    missing = [flag for flag in AVX2_FLAGS if flag not in machine.isa_flags]
    if asked == "auto":
        reasons["instruction_set"] = "portable code" if missing else "avx2, or wider ones that give the same bits"
        if runner == "reference":
            reasons["instruction_set"] = "those that NumPy chooses"
        return asked
    because, hint = "", ""
    if runner == "reference":
        because, hint = "it is for the C++ kernels, and the NumPy reference runs", "leave out `--instruction-set`"
    elif asked == "avx2" and missing:
        because, hint = f"this CPU lacks {', '.join(missing)}", "`--instruction-set portable`"
    if because:
        raise InvalidParameterError(f"{asked} cannot be used", param="instruction_set", because=because, hints=(hint,))
    return asked


def _threads(config: EngineConfig, machine: Machine, reasons: dict[str, str]) -> int:
    if config.threads is not None:
        return config.threads
    cores = machine.num_physical_cores
    quota = machine.cpu_quota
    # Rounded down: threads that wait at a barrier spin, and spinning on a quota that is used up stalls them all.
    if quota is not None and int(quota.cpus) < cores:
        reasons["threads"] = f"CPU quota of {quota.cpus:g} ({quota.path}), rounded down"
        return max(1, int(quota.cpus))
    reasons["threads"] = f"physical cores that this process may use ({machine.num_logical_cpus} logical)"
    return cores


def _step_limits(config: EngineConfig, purpose: Purpose, reasons: dict[str, str]) -> tuple[int, int]:
    num_seqs, batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if num_seqs is None:
        num_seqs = DEFAULT_NUM_SEQS[purpose]
        reasons["max_num_seqs"] = f"default when {'serving' if purpose == 'serving' else 'generating offline'}"
        if batched_tokens is not None and batched_tokens < num_seqs:
            num_seqs = batched_tokens
            reasons["max_num_seqs"] = f"a step of {batched_tokens:,} tokens has one for each of so many requests"
    if batched_tokens is None:
        batched_tokens = max(DEFAULT_BATCHED_TOKENS, num_seqs)
        reasons["max_num_batched_tokens"] = (
            "default" if num_seqs <= DEFAULT_BATCHED_TOKENS else "one token for each running request"
        )
    return num_seqs, batched_tokens


def _kv_dtype(config: EngineConfig, reasons: dict[str, str]) -> KVDtype:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    reasons["kv_cache_dtype"] = "half the bytes of f32"
    return "f16"


def _skipped_layers(config: EngineConfig, spec: ModelSpec, kv_dtype: KVDtype) -> tuple[int, ...]:
    """Return the layers that stay in 16 bit.

    Raises:
        InvalidParameterError: a layer that the model has not, or a width that int4 cannot pack.
    """
    beyond = [layer for layer in config.kv_cache_dtype_skip_layers if layer >= spec.num_layers]
    if beyond:
        raise InvalidParameterError(
            f"{spec.name} has no layer {beyond[0]:,}",
            param="kv_cache_dtype_skip_layers",
            because=f"its {spec.num_layers:,} layers are counted from 0 to {spec.num_layers - 1:,}",
        )
    if kv_dtype == "int4" and spec.head_dim % 2:
        raise InvalidParameterError(
            f"int4 packs numbers in pairs, and {spec.name} has heads of {spec.head_dim:,}",
            param="kv_cache_dtype",
            hints=("`--kv-cache-dtype int8`",),
        )
    return config.kv_cache_dtype_skip_layers


def _attention_sinks(config: EngineConfig, reasons: dict[str, str]) -> int | None:
    """Return how many sinks stand before a window. The window is asked for, but nobody should overlook its price."""
    if config.attention_window is None:
        return None
    num_sinks = config.num_sinks
    reasons["attention_window"] = (
        f"asked; lossy: answers are another model's from token {num_sinks + config.attention_window + 1:,} on"
    )
    reasons["attention_sinks"] = (
        "first tokens, which stay visible" if config.attention_sinks is None else "asked; first tokens stay visible"
    )
    return num_sinks


def _prefix_cache(config: EngineConfig, reasons: dict[str, str]) -> bool:
    if config.enable_prefix_caching and config.kv_allocator == "reserved":
        reasons["enable_prefix_caching"] = "off: contiguous reservations cannot share blocks"
        return False
    return config.enable_prefix_caching


def _length_limit(config: EngineConfig, spec: ModelSpec, reasons: dict[str, str]) -> int:
    limit, why = spec.max_position, "the model's limit"
    if config.max_model_len is None:
        reasons["max_model_len"] = why
        return limit
    if config.max_model_len > limit:
        raise InvalidParameterError(
            f"{config.max_model_len:,} tokens are more than {spec.name} takes",
            param="max_model_len",
            because=f"{limit:,} tokens are {why}",
            hints=(f"`--max-model-len {limit}`",),
        )
    return config.max_model_len
