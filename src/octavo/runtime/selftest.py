"""Self-test: every native kernel against the reference, on the machine at hand.

Compilers, processors and virtual machines differ; what was tested elsewhere may be wrong here. Three kinds of checks:

    products     each weight kind and instruction set against its stated arithmetic (`reference_linear.py`): same bits
    steps        whole steps of a small random model, in each KV dtype, native against reference: log-probabilities
                 agree to the rounding of float32; covers every op of a program, copies, windows and sampling
    invariance   the same requests alone and together, on one thread and two: same bits

No printing and no files; a fresh random seed each time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import KVDtype
from octavo.core.block_hash import root_key
from octavo.core.content import TokenContent
from octavo.core.events import EventLog
from octavo.core.kv_cache import GroupSpec
from octavo.core.limits import Limits
from octavo.core.paged_kv_cache import PagedKVCache
from octavo.core.ports import Runner
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepResult, TokenLogprobs
from octavo.models.decoder import emit_decoder
from octavo.models.held_kinds import HELD_KINDS
from octavo.models.kv_groups import make_kv_groups
from octavo.models.names import tensor_shapes
from octavo.models.program import Program
from octavo.models.spec import ModelSpec, Rope
from octavo.models.tensor_kinds import KIND_LAYOUTS, TensorKind
from octavo.models.weights import Tensor
from octavo.runtime import _native
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import pack_weights
from octavo.runtime.reference_linear import linear
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.units import RequestId

Float32 = NDArray[np.float32]

NUM_BLOCKS = 64
BLOCK_SIZE = 16
PROMPT_LENGTHS = (1, 15, 16, 17, 33, 70)
LOGPROB_TOLERANCE = 2e-4
# Other caches round keys and values; a value that lies on the edge may be rounded either way by the two runners.
_KV_TOLERANCES: dict[KVDtype, float] = {
    "f32": LOGPROB_TOLERANCE,
    "f16": 25 * LOGPROB_TOLERANCE,
    "bf16": 25 * LOGPROB_TOLERANCE,
    "int8": 250 * LOGPROB_TOLERANCE,
    "fp8_e4m3": 1000 * LOGPROB_TOLERANCE,
    "int4": 2000 * LOGPROB_TOLERANCE,
}
"""Absolute, on natural logs around -10: sums of a few hundred float32 products in two different orders."""

# Where the half-float scales of a block lie, by kind.
_SCALE_BYTES: dict[TensorKind, slice] = {
    "q8_0": slice(0, 2),
    "q4_0": slice(0, 2),
    "q4_1": slice(0, 4),
    "q4_k": slice(0, 4),
    "q6_k": slice(208, 210),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: what was compared, whether it held, and by how much it failed."""

    name: str
    is_passed: bool
    detail: str = ""


def run_checks(seed: int | None = None) -> Iterator[Check]:
    """Run every check and yield each result as it is known.

    Args:
        seed: Repeats a run; drawn when not given. It is part of a failed check's detail.
    """
    drawn = secrets.randbits(32) if seed is None else seed
    yield from _check_products(np.random.default_rng(drawn), drawn)
    for kv_cache_dtype in _KV_TOLERANCES:
        yield _check_steps(kv_cache_dtype, drawn)
        yield _check_invariance(kv_cache_dtype, drawn)


# ---- products ----


def _check_products(rng: np.random.Generator, seed: int) -> Iterator[Check]:
    # The widest kernels stand in for AVX2 by themselves; both are tested.
    for isa, may_widen in (("portable", False), *((isa, widen) for isa in _vector_sets() for widen in (False, True))):
        for kind in HELD_KINDS:
            num_inputs, num_outputs, num_rows = 512, 49, 37
            rows = _random_rows(rng, kind, num_outputs, num_inputs)
            x = rng.standard_normal((num_rows, num_inputs), dtype=np.float32)
            packed = _native.pack_linear(
                [(kind, rows.reshape(-1), num_outputs, None)], num_inputs, isa, may_widen=may_widen
            )
            stated = linear(x, rows, kind, is_fused=isa != "portable")
            is_equal = all(
                np.array_equal(packed.run(x, threads=threads), stated) and np.array_equal(packed.run(x[:1]), stated[:1])
                for threads in (1, 2)
            )
            yield Check(
                name=f"product of {kind} weights, {packed.kernels}",
                is_passed=is_equal,
                detail="" if is_equal else f"bits differ from the stated arithmetic (seed {seed})",
            )


def _vector_sets() -> list[str]:
    best = str(_native.isa_name("auto"))
    return [] if best == "portable" else [best]


def _random_rows(rng: np.random.Generator, kind: TensorKind, num_rows: int, num_inputs: int) -> NDArray[np.uint8]:
    """Return rows as a file stores them; of block kinds, random codes under scales of either sign up to 0.1."""
    if kind in {"f32", "f16", "bf16"}:
        values = rng.standard_normal((num_rows, num_inputs), dtype=np.float32)
        if kind == "f16":
            return values.astype(np.float16).view(np.uint8)
        if kind == "bf16":
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    layout = KIND_LAYOUTS[kind]
    shape = (num_rows, num_inputs // layout.block_size, layout.block_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    where = _SCALE_BYTES[kind]
    halves = rng.uniform(-0.1, 0.1, (*shape[:2], 2)).astype(np.float16).view(np.uint8)
    blocks[..., where] = halves[..., : where.stop - where.start]
    return blocks.reshape(num_rows, -1)


# ---- whole steps ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    spec: ModelSpec
    program: Program
    weights: Mapping[str, Float32]


def _random_model(seed: int) -> _Model:
    """Return a model with a full layer and a window layer, grouped heads, biases, head norms and an untied head."""
    spec = ModelSpec(
        name="selftest",
        architecture="qwen3",
        vocab_size=331,
        hidden_size=96,
        intermediate_size=160,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=40,
        max_position=1024,
        norm_eps=1e-5,
        rope=Rope(rotary_dim=40),
        tie_embeddings=False,
        qkv_bias=True,
        qk_norm=True,
        kv_groups=make_kv_groups((None, 24)),
    )
    rng = np.random.default_rng(seed)
    # 0.125 rather than a trained model's 0.02, with which the output would hardly depend on what the cache holds.
    weights = {
        name: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.125) + np.float32(name.endswith("norm"))
        for name, shape in tensor_shapes(spec).items()
    }
    return _Model(spec=spec, program=emit_decoder(spec), weights=weights)


def _native_runner(model: _Model, kv_cache_dtype: KVDtype, threads: int) -> NativeRunner:
    tensors = (
        Tensor(name=name, shape=values.shape, kind="f32", data=values.reshape(-1, values.shape[-1]).view(np.uint8))
        for name, values in model.weights.items()
    )
    return NativeRunner(
        model.spec,
        model.program,
        pack_weights(tensors, model.program),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        poison=True,
    )


def _check_steps(kv_cache_dtype: KVDtype, seed: int) -> Check:
    model = _random_model(seed)
    native = _native_runner(model, kv_cache_dtype, threads=2)
    reference = ReferenceRunner(
        model.spec,
        model.program,
        model.weights,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=kv_cache_dtype,
        poison=True,
    )
    worst = 0.0

    def compare(ours: StepResult, theirs: StepResult) -> None:
        nonlocal worst
        for mine, other in zip(_logprobs(ours), _logprobs(theirs), strict=True):
            theirs_by_id = dict(other.top)
            shared = [(value, theirs_by_id[token]) for token, value in mine.top if token in theirs_by_id]
            worst = max(worst, *(abs(value - other_value) for value, other_value in shared), 0.0 if shared else 1e9)

    _answer(model, reference, seed, beside=native, compare=compare)
    tolerance = _KV_TOLERANCES[kv_cache_dtype]
    return Check(
        name=f"whole steps against the reference, {kv_cache_dtype} KV",
        is_passed=worst <= tolerance,
        detail=f"log-probabilities within {worst:.1e}" + ("" if worst <= tolerance else f" (seed {seed})"),
    )


def _check_invariance(kv_cache_dtype: KVDtype, seed: int) -> Check:
    model = _random_model(seed)
    together = _answer(model, _native_runner(model, kv_cache_dtype, threads=2), seed)
    alone = _answer(model, _native_runner(model, kv_cache_dtype, threads=1), seed, max_num_seqs=1)
    return Check(
        name=f"alone equals together, 1 thread equals 2, {kv_cache_dtype} KV",
        is_passed=together == alone,
        detail="" if together == alone else f"bits differ (seed {seed})",
    )


def _answer(
    model: _Model,
    runner: Runner,
    seed: int,
    *,
    max_num_seqs: int = 16,
    beside: Runner | None = None,
    compare: Callable[[StepResult, StepResult], None] | None = None,
) -> dict[str, list[TokenLogprobs]]:
    """Answer a few prompts, chunked and forked; return every scored token by request.

    Args:
        beside: Executes the same plans; what it answers is given to `compare`, and not used otherwise.
    """
    events = EventLog()
    groups = [GroupSpec(window=group.window) for group in model.spec.kv_groups]
    kv_cache = PagedKVCache(NUM_BLOCKS, BLOCK_SIZE, groups=groups, max_chunk_tokens=64, events=events)
    limits = Limits(max_model_len=256, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    scheduler = Scheduler(kv_cache, limits, events=events)
    for first, *forks in _requests(model, seed):
        scheduler.add(first, forks)
    scores: dict[str, list[TokenLogprobs]] = {}
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        result = runner.execute(plan)
        if beside is not None and compare is not None:
            compare(beside.execute(plan), result)
        for update in scheduler.commit(plan, result):
            found = (*update.prompt_logprobs, *((update.logprobs,) if update.logprobs else ()))
            scores.setdefault(update.request_id, []).extend(found)
    return scores


def _requests(model: _Model, seed: int) -> Iterator[list[Request]]:
    rng = np.random.default_rng(seed)
    root = root_key(b"selftest", None)
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = rng.integers(0, model.spec.vocab_size, length).tolist()
        is_forked = index % 2 == 1
        params = SamplingParams(
            temperature=0.8 if is_forked else 0.0,
            top_p=0.9,
            max_tokens=6,
            n=3 if is_forked else 1,
            logprobs=8,
            prompt_logprobs=None if is_forked else 8,
        )
        yield [
            Request(RequestId(f"{index}/{k}"), TokenContent(prompt), params, root=root, seed=seed + k)
            for k in range(params.n)
        ]


def _logprobs(result: StepResult) -> Iterator[TokenLogprobs]:
    for sampled in result.samples:
        if sampled.logprobs is not None:
            yield sampled.logprobs
    for scores in result.prompt_logprobs:
        yield from scores
