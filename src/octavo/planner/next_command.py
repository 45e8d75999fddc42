"""The command that starts what was planned, to paste into a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from octavo.config.engine import OPTIONS
from octavo.planner.question import PlanQuestion
from octavo.planner.sizer import ranks
from octavo.planner.sizing import Sizing
from octavo.planner.subject import Subject
from octavo.units import MIB

_COMMANDS = {"serving": "octavo serve", "offline": "octavo generate"}
# Other engines name KV dtypes their own way; what is not here, they name as we do.
_VLLM_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_SGLANG_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp8": "fp8_e4m3"}


def next_command(question: PlanQuestion, sizing: Sizing, subject: Subject) -> str:
    """Return the command line; empty where nothing fits."""
    if not sizing.max_model_len or not sizing.longest_fitting_len:
        return ""
    words = {"octavo": _octavo, "vllm": _vllm, "sglang": _sglang}[sizing.engine](question, sizing, subject)
    return " ".join(words)


def _octavo(question: PlanQuestion, sizing: Sizing, subject: Subject) -> Iterator[str]:
    yield _COMMANDS[question.purpose]
    yield shlex.quote(subject.asked)
    for each in OPTIONS:
        value = getattr(question, each.name)
        if each.is_positional or value is None or value == each.default or each.name in ("max_model_len", "memory"):
            continue
        if each.kind == "flag":
            yield f"--{'' if value else 'no-'}{each.flag_name}"
        else:
            yield f"--{each.flag_name} {_spelt(value) if each.kind == 'bytes' else value}"
    if question.memory is not None or question.device is not None:
        yield f"--memory {_spelt(sizing.memory_bytes)}"
    if question.max_model_len is not None or question.is_length_auto:
        yield f"--max-model-len {min(sizing.max_model_len, sizing.longest_fitting_len)}"
    if question.purpose == "offline":
        yield "-p 'The capital of France is'"


def _vllm(question: PlanQuestion, sizing: Sizing, subject: Subject) -> Iterator[str]:
    if sizing.max_model_len > subject.shape.max_position:
        yield "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    yield f"vllm serve {shlex.quote(subject.name if subject.opened is None else subject.asked)}"
    tensor, stages = ranks(question)
    if tensor > 1:
        yield f"--tensor-parallel-size {tensor}"
    if stages > 1:
        yield f"--pipeline-parallel-size {stages}"
    yield f"--max-model-len {min(sizing.max_model_len, sizing.longest_fitting_len)}"
    if question.utilization is not None:
        yield f"--gpu-memory-utilization {question.utilization:g}"
    if question.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {_VLLM_DTYPES.get(question.kv_cache_dtype, question.kv_cache_dtype)}"
    if question.weight_dtype in ("fp8", "mxfp4", "awq", "gptq"):
        yield f"--quantization {question.weight_dtype}"
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(question, name) is not None:
            yield f"--{name.replace('_', '-')} {getattr(question, name)}"
    if question.num_blocks is not None:
        yield f"--num-gpu-blocks-override {question.num_blocks}"
    if question.kv_cache_memory is not None:
        yield f"--kv-cache-memory-bytes {question.kv_cache_memory}"
    if not question.enable_prefix_caching:
        yield "--no-enable-prefix-caching"


def _sglang(question: PlanQuestion, sizing: Sizing, subject: Subject) -> Iterator[str]:
    name = subject.name if subject.opened is None else subject.asked
    if sizing.max_model_len > subject.shape.max_position:
        yield "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
    yield f"python -m sglang.launch_server --model-path {shlex.quote(name)}"
    tensor, stages = ranks(question)
    if tensor > 1:
        yield f"--tp-size {tensor}"
    if stages > 1:
        yield f"--pp-size {stages}"
    yield f"--context-length {min(sizing.max_model_len, sizing.longest_fitting_len)}"
    if question.utilization is not None:
        yield f"--mem-fraction-static {question.utilization:g}"
    if question.kv_cache_dtype != "auto":
        yield f"--kv-cache-dtype {_SGLANG_DTYPES.get(question.kv_cache_dtype, question.kv_cache_dtype)}"
    if question.weight_dtype in ("fp8", "awq", "gptq"):
        yield f"--quantization {question.weight_dtype}"
    if question.max_num_seqs is not None:
        yield f"--max-running-requests {question.max_num_seqs}"
    if question.max_num_batched_tokens is not None:
        yield f"--chunked-prefill-size {question.max_num_batched_tokens}"
    if question.block_size is not None:
        yield f"--page-size {question.block_size}"


def _spelt(num_bytes: int) -> str:
    return f"{num_bytes // MIB}MiB" if num_bytes % MIB == 0 else f"{num_bytes}B"
