"""The command that starts what was planned, to paste into a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from octavo.config.engine import OPTIONS
from octavo.planner.question import PlanQuestion, default_of
from octavo.planner.sizer import ranks
from octavo.planner.sizing import Sizing
from octavo.planner.subject import Subject
from octavo.units import MIB

_COMMANDS = {"serving": "octavo serve", "offline": "octavo generate"}
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_PACKED_AT_START = {"fp8": "fp8", "bnb-nf4": "bitsandbytes"}
"""What engines make of 16-bit weights while they load; the rest has to be in the files."""
# Other engines name KV dtypes their own way; what is not here, they name as we do.
_VLLM_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_SGLANG_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp8": "fp8_e4m3"}


def next_command(question: PlanQuestion, sizing: Sizing, subject: Subject) -> str:
    """Return the command line; empty where nothing fits."""
    if not sizing.max_model_len or not sizing.longest_fitting_len:
        return ""
    if sizing.engine != "octavo" and needs_packed_checkpoint(question, subject):
        return ""
    if not subject.name_for(sizing.engine):
        return ""
    words = {"octavo": _octavo, "vllm": _vllm, "sglang": _sglang}[sizing.engine](question, sizing, subject)
    return " ".join(words)


def _octavo(question: PlanQuestion, sizing: Sizing, subject: Subject) -> Iterator[str]:
    yield _COMMANDS[question.purpose]
    yield shlex.quote(subject.name_for("octavo"))
    for each in OPTIONS:
        value = question.value(each.name)
        if each.is_positional or value is None or value == each.default or each.name in ("max_model_len", "memory"):
            continue
        if each.kind == "flag":
            yield f"--{'' if value else 'no-'}{each.flag_name}"
        else:
            words = ",".join(map(str, value)) if isinstance(value, tuple) else value
            yield f"--{each.flag_name} {_spelt(value) if each.kind == 'bytes' else words}"
    if question.memory is not None or question.device is not None:
        yield f"--memory {_spelt(sizing.memory_bytes)}"
    if question.max_model_len is not None or question.is_length_auto:
        yield f"--max-model-len {min(sizing.max_model_len, sizing.longest_fitting_len)}"
    if question.purpose == "offline":
        yield "-p 'The capital of France is'"


def _vllm(question: PlanQuestion, sizing: Sizing, subject: Subject) -> Iterator[str]:
    if sizing.max_model_len > subject.shape.max_position:
        yield "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    yield f"vllm serve {shlex.quote(subject.name_for('vllm'))}"
    tensor, stages = ranks(question)
    yield from _sizes({"tensor-parallel-size": tensor, "pipeline-parallel-size": stages}, default=1)
    yield f"--max-model-len {min(sizing.max_model_len, sizing.longest_fitting_len)}"
    if question.utilization is not None:
        yield f"--gpu-memory-utilization {question.utilization:g}"
    if question.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {_VLLM_DTYPES.get(question.kv_cache_dtype, question.kv_cache_dtype)}"
    yield from _weights(question)
    yield from _sizes(
        {
            "seed": question.value("seed"),
            "max-num-seqs": question.max_num_seqs,
            "max-num-batched-tokens": question.max_num_batched_tokens,
            "block-size": question.block_size,
            "num-gpu-blocks-override": question.num_blocks,
            "kv-cache-memory-bytes": question.kv_cache_memory,
        }
    )
    if not question.enable_prefix_caching:
        yield "--no-enable-prefix-caching"
    if question.value("scheduling_policy") != default_of("scheduling_policy"):
        yield f"--scheduling-policy {question.value('scheduling_policy')}"
    if question.enforce_eager:
        yield "--enforce-eager"


def _sglang(question: PlanQuestion, sizing: Sizing, subject: Subject) -> Iterator[str]:
    if sizing.max_model_len > subject.shape.max_position:
        yield "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
    yield f"python -m sglang.launch_server --model-path {shlex.quote(subject.name_for('sglang'))}"
    tensor, stages = ranks(question)
    yield from _sizes({"tp-size": tensor, "pp-size": stages}, default=1)
    yield f"--context-length {min(sizing.max_model_len, sizing.longest_fitting_len)}"
    if question.utilization is not None:
        yield f"--mem-fraction-static {question.utilization:g}"
    if question.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {_SGLANG_DTYPES.get(question.kv_cache_dtype, question.kv_cache_dtype)}"
    yield from _weights(question)
    is_pool_asked = question.num_blocks is not None or question.kv_cache_memory is not None
    yield from _sizes(
        {
            "random-seed": question.value("seed"),
            "max-total-tokens": sizing.pool_tokens if is_pool_asked else None,
            "max-running-requests": question.max_num_seqs,
            "chunked-prefill-size": question.max_num_batched_tokens,
            "page-size": question.block_size,
        }
    )
    if not question.enable_prefix_caching:
        yield "--disable-radix-cache"
    if question.enforce_eager:
        yield "--disable-cuda-graph"


def needs_packed_checkpoint(question: PlanQuestion, subject: Subject) -> bool:
    """Tell whether weights were asked in a way that an engine only loads, and the model is published otherwise."""
    asked = question.weight_dtype
    is_made_at_start = asked == "auto" or asked in _FLOATS or asked in _PACKED_AT_START
    return not is_made_at_start and asked != subject.shape.quantization


def _weights(question: PlanQuestion) -> Iterator[str]:
    if question.weight_dtype in _FLOATS:
        yield f"--dtype {_FLOATS[question.weight_dtype]}"
    elif question.weight_dtype in _PACKED_AT_START:
        yield f"--quantization {_PACKED_AT_START[question.weight_dtype]}"


def _sizes(flags: Mapping[str, int | None], *, default: int | None = None) -> Iterator[str]:
    """Return those flags that say something."""
    yield from (f"--{name} {value}" for name, value in flags.items() if value not in (None, default))


def _spelt(num_bytes: int) -> str:
    return f"{num_bytes // MIB}MiB" if num_bytes % MIB == 0 else f"{num_bytes}B"
