"""How fast the kernels other than products are: attention, norms, rotation and storing, adding, activation, sampling.

They run as they do in a model, in steps of an executor that keeps time by kind of op, in programs made of them alone.
Activations are random; keys and values that no step computed are zeros in memory that is really there, so that reading
them costs what it always does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from octavo.config.engine import NATIVE_TILE_TOKENS, KVDtype
from octavo.core.sampling import SamplingParams
from octavo.core.step import GroupTables, SampleRow, StepPlan
from octavo.models.kv_groups import layer_windows, make_kv_groups
from octavo.models.kv_record import row_bytes
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    Buffer,
    Embed,
    HeadRmsNorm,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    SelectRows,
)
from octavo.models.spec import ModelSpec
from octavo.models.weights import Tensor
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import pack_weights
from octavo.units import RequestId, cdiv

FLOAT_BYTES = 4

_PASSES = 5
_TABLE_ROWS = 64
_POOL_BYTES = 384 << 20
"""About what the keys and values of the timed layers take: more than most caches, little enough for any machine."""
_WAITING_OP = "head_rms_norm"
_SPREAD = np.float32(4)
"""Standard deviation of activations and logits: with logits around 1 every token would be about as likely as any."""
_SAMPLED_ROWS = 64
_SAMPLINGS = {
    "sample, greedy": SamplingParams(temperature=0.0),
    "sample, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests of one step: each computes `num_rows` tokens after `start` tokens in the cache."""

    num_requests: int
    num_rows: int
    start: int

    @property
    def total_rows(self) -> int:
        return self.num_requests * self.num_rows

    @property
    def context_tokens(self) -> int:
        return self.start + self.num_rows


DECODES = tuple(
    Batch(num_requests=requests, num_rows=1, start=context - 1)
    for requests, context in ((1, 128), (1, 1024), (1, 4096), (16, 128), (16, 1024))
)
PREFILLS = tuple(Batch(num_requests=1, num_rows=512, start=start) for start in (0, 1536, 3584))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpeed:
    """One kernel in one situation.

    Args:
        kernel: What it does.
        kind: Element type of the weights or of the stored keys and values; float32 where nothing else is said.
        num_rows: Rows of activations.
        context_tokens: Tokens that the last query of a request attends to; `None` for other kernels.
        wall_s: Time of one call.
        flop: Floating-point operations of a call; `None` where they do not bound it.
        num_bytes: Least bytes that a call must move.
    """

    kernel: str
    kind: str
    num_rows: int
    context_tokens: int | None
    wall_s: float
    flop: float | None
    num_bytes: float


def fitting(batches: Sequence[Batch], max_position: int) -> tuple[Batch, ...]:
    """Return the batches whose contexts the model takes."""
    return tuple(batch for batch in batches if batch.context_tokens <= max_position)


def measure_layers(
    spec: ModelSpec,
    batches: Sequence[Batch],
    *,
    kv_cache_dtype: KVDtype,
    threads: int,
    isa: str = "auto",
    on_batch: Callable[[], None] = lambda: None,
) -> Iterator[KernelSpeed]:
    """Yield attention for each batch, and once, for the first batch with the most rows, the row-wise kernels."""
    pool_tokens = max(batch.num_requests * batch.context_tokens for batch in batches)
    timed = _shortened(spec, pool_tokens, kv_cache_dtype)
    blocks_per_group = max(batch.num_requests * cdiv(batch.context_tokens, NATIVE_TILE_TOKENS) for batch in batches)
    most_rows = max(batch.total_rows for batch in batches)
    runner = _runner(
        timed,
        _layers_program(timed),
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        isa=isa,
        num_blocks=blocks_per_group * len(timed.kv_groups),
        max_rows=most_rows,
        max_requests=max(batch.num_requests for batch in batches),
    )
    row_wise: list[KernelSpeed] = []
    for batch in batches:
        seconds = _median_seconds(runner, _plan(batch, num_groups=len(timed.kv_groups)))
        yield _attention(timed, batch, (seconds["attend"] + seconds[_WAITING_OP]) / timed.num_layers, kv_cache_dtype)
        if batch.total_rows == most_rows and not row_wise:
            row_wise += _row_wise(timed, batch, seconds, kv_cache_dtype)
        on_batch()
    yield from row_wise


def measure_sampling(spec: ModelSpec, *, threads: int, isa: str = "auto") -> Iterator[KernelSpeed]:
    """Yield the choice of one token for each of 64 rows of logits."""
    program = Program(
        ops=(Embed(out="scores", weight="scores_table"), SelectRows(x="scores", out="logits")),
        buffers={
            "scores": Buffer(width=spec.vocab_size, rows="token"),
            "logits": Buffer(width=spec.vocab_size, rows="selected"),
        },
        logits="logits",
    )
    timed = replace(spec, num_layers=1, kv_groups=make_kv_groups((None,)))
    runner = _runner(
        timed,
        program,
        kv_cache_dtype="f16",
        threads=threads,
        isa=isa,
        num_blocks=_SAMPLED_ROWS,
        max_rows=_SAMPLED_ROWS,
        max_requests=_SAMPLED_ROWS,
    )
    batch = Batch(num_requests=_SAMPLED_ROWS, num_rows=1, start=0)
    for name, params in _SAMPLINGS.items():
        seconds = _median_seconds(runner, _plan(batch, num_groups=1, params=params))
        yield KernelSpeed(
            kernel=name,
            kind="f32",
            num_rows=_SAMPLED_ROWS,
            context_tokens=None,
            wall_s=seconds["sample"],
            flop=None,
            num_bytes=_SAMPLED_ROWS * spec.vocab_size * FLOAT_BYTES,
        )


# ---- what is run ----


def _shortened(spec: ModelSpec, pool_tokens: int, kv_cache_dtype: KVDtype) -> ModelSpec:
    """Return the model with as many of its first layers as the pool has room for."""
    layer_token_bytes = 2 * spec.num_kv_heads * row_bytes(kv_cache_dtype, spec.head_dim)
    num_layers = min(spec.num_layers, max(1, _POOL_BYTES // (pool_tokens * layer_token_bytes)))
    windows = layer_windows(spec.kv_groups)[:num_layers]
    return replace(spec, num_layers=num_layers, kv_groups=make_kv_groups(windows), vocab_size=_TABLE_ROWS)


def _layers_program(spec: ModelSpec) -> Program:
    """Return a decoder without its products: what they would have written stays what it was before the first layer.

    The wait for the slowest thread of an attention counts for the op after it: a norm of one head, which costs nothing.
    """
    windows = layer_windows(spec.kv_groups)
    ops: list[Op] = [Embed(out=name, weight=f"{name}_table") for name in ("residual", "qkv", "gate_up")]
    for layer in range(spec.num_layers):
        ops += [
            RmsNorm(x="residual", out="branch", weight="norm", eps=spec.norm_eps),
            Activate(x="gate_up", out="activated", kind="silu"),
            Add(x="residual", y="branch"),
            RopeStore(qkv="qkv", layer=layer),
            Attend(qkv="qkv", out="attended", layer=layer, scale=spec.head_dim**-0.5, window=windows[layer]),
            HeadRmsNorm(x="qkv", offset=0, num_heads=1, head_dim=spec.head_dim, weight="head_norm", eps=spec.norm_eps),
        ]
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = {
        "residual": spec.hidden_size,
        "branch": spec.hidden_size,
        "qkv": q_width + 2 * kv_width,
        "attended": q_width,
        "gate_up": 2 * spec.intermediate_size,
        "activated": spec.intermediate_size,
    }
    buffers = {name: Buffer(width=width, rows="token") for name, width in widths.items()}
    return Program(ops=tuple(ops), buffers=buffers, logits="residual")


def _runner(
    spec: ModelSpec,
    program: Program,
    *,
    kv_cache_dtype: KVDtype,
    threads: int,
    isa: str,
    num_blocks: int,
    max_rows: int,
    max_requests: int,
) -> NativeRunner:
    tables = {op.weight: program.buffers[op.out].width for op in program.ops if isinstance(op, Embed)}
    rng = np.random.default_rng(0)
    tensors = [
        _tensor(name, rng.standard_normal((_TABLE_ROWS, width), np.float32) * _SPREAD) for name, width in tables.items()
    ]
    if any(isinstance(op, RmsNorm) for op in program.ops):
        tensors.append(_tensor("norm", np.ones(spec.hidden_size, np.float32)))
        tensors.append(_tensor("head_norm", np.ones(spec.head_dim, np.float32)))
    return NativeRunner(
        spec,
        program,
        pack_weights(tensors, program, isa=isa),
        num_blocks=num_blocks,
        block_size=NATIVE_TILE_TOKENS,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        isa=isa,
        max_num_batched_tokens=max_rows,
        max_num_seqs=max_requests,
        prefault=True,
        is_timed=True,
    )


def _tensor(name: str, values: npt.NDArray[np.float32]) -> Tensor:
    rows = values.reshape(values.shape[0] if values.ndim == 2 else 1, -1)
    return Tensor(name=name, shape=values.shape, kind="f32", data=rows.view(np.uint8))


def _plan(batch: Batch, *, num_groups: int, params: SamplingParams | None = None) -> StepPlan:
    """Return a step in which each request has blocks of its own in each group, and samples if `params` are given."""
    requests = tuple(RequestId(str(index)) for index in range(batch.num_requests))
    each = cdiv(batch.context_tokens, NATIVE_TILE_TOKENS)
    per_group = batch.num_requests * each
    tables = tuple(
        GroupTables(
            block_ids=array("i", range(1 + group * per_group, 1 + (group + 1) * per_group)),
            offsets=array("i", range(0, per_group + 1, each)),
        )
        for group in range(num_groups)
    )
    samples = () if params is None else requests
    return StepPlan(
        step=0,
        request_ids=requests,
        query_offsets=array("i", range(0, batch.total_rows + 1, batch.num_rows)),
        start_positions=array("i", [batch.start] * batch.num_requests),
        token_ids=array("i", [row % _TABLE_ROWS for row in range(batch.total_rows)]),
        tables=tables,
        selected_rows=array("i", range(len(samples))),
        samples=tuple(
            SampleRow(request_id=request, logits_row=row, position=batch.context_tokens, params=params, seed=row)
            for row, request in enumerate(samples)
            if params is not None
        ),
    )


def _median_seconds(runner: NativeRunner, plan: StepPlan) -> dict[str, float]:
    """Return the seconds of a step by kind of op, medians of several after one that does not count."""
    runner.execute(plan)
    passes = []
    for _ in range(_PASSES):
        before = runner.seconds
        runner.execute(plan)
        passes.append({name: seconds - before[name] for name, seconds in runner.seconds.items()})
    return {name: median(each[name] for each in passes) for name in passes[0]}


# ---- what it comes to ----


def _attention(spec: ModelSpec, batch: Batch, wall_s: float, kv_cache_dtype: KVDtype) -> KernelSpeed:
    """Count the first layer's window for all: models mix them too seldom to report each."""
    window = layer_windows(spec.kv_groups)[0]
    contexts = range(batch.start + 1, batch.context_tokens + 1)
    seen = sum(min(context, window or context) for context in contexts)
    stored = min(batch.context_tokens, (window or batch.context_tokens) + batch.num_rows - 1)
    kv_bytes = stored * 2 * spec.num_kv_heads * row_bytes(kv_cache_dtype, spec.head_dim)
    query_bytes = 2 * spec.num_heads * spec.head_dim * FLOAT_BYTES
    return KernelSpeed(
        kernel="attention, decode" if batch.num_rows == 1 else "attention, prefill",
        kind=kv_cache_dtype,
        num_rows=batch.total_rows,
        context_tokens=batch.context_tokens,
        wall_s=wall_s,
        flop=4.0 * spec.num_heads * spec.head_dim * seen * batch.num_requests,
        num_bytes=batch.num_requests * (kv_bytes + batch.num_rows * query_bytes),
    )


def _row_wise(
    spec: ModelSpec, batch: Batch, seconds: Mapping[str, float], kv_cache_dtype: KVDtype
) -> Iterator[KernelSpeed]:
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    stored_bytes = 2 * spec.num_kv_heads * row_bytes(kv_cache_dtype, spec.head_dim)
    moved_bytes = {
        "rms_norm": 2 * spec.hidden_size * FLOAT_BYTES,
        "rope_store": (2 * (q_width + kv_width) + kv_width) * FLOAT_BYTES + stored_bytes,
        "add": 3 * spec.hidden_size * FLOAT_BYTES,
        "activate": 3 * spec.intermediate_size * FLOAT_BYTES,
    }
    names = {"rms_norm": "norm", "rope_store": "rotate and store", "add": "add", "activate": "activate"}
    for op, name in names.items():
        yield KernelSpeed(
            kernel=name,
            kind=kv_cache_dtype if op == "rope_store" else "f32",
            num_rows=batch.total_rows,
            context_tokens=None,
            wall_s=seconds[op] / spec.num_layers,
            flop=None,
            num_bytes=batch.total_rows * moved_bytes[op],
        )
