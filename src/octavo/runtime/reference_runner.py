"""ReferenceRunner: executes step plans in NumPy, op by op.

It is the specification of every op that faster runners are compared with, and fast enough to chat with a small model.
The bits of a row depend on its own tokens alone (see `row_matmul.py` and `reference_attention.py`), so batching,
chunking, block size, copies and preemption can change no answer.

What a step does, in order: poison (tests only), block copies, the ops over all rows of the step up to `SelectRows`, the
ops after it over the selected rows, at most 64 at a time, each followed by sampling and scoring of its logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import KVDtype
from octavo.core.step import SampledToken, StepPlan, StepResult, TokenLogprobs
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    BufferName,
    Combine,
    Embed,
    EmbedPosition,
    ExpertLinear,
    HeadRmsNorm,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    Route,
    SelectRows,
    SoftCap,
    WeightName,
    product_weights,
)
from octavo.models.spec import ModelSpec
from octavo.runtime import reference_ops
from octavo.runtime.hadamard import hadamard, hadamard_inverse, is_transformed
from octavo.runtime.kv_codes import Stored
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.reference_attention import attend, attention_shapes
from octavo.runtime.rope_table import RopeTable
from octavo.runtime.row_matmul import RowArithmetic, RowMatmul, Shape, choose_row_arithmetic, panel_rows
from octavo.runtime.sampler import check_logits, sample, token_logprobs
from octavo.runtime.step_inputs import RequestRows, StepInputs, read_step_inputs

Float32 = NDArray[np.float32]

MAX_LOGITS_ROWS = 64
"""Logits held at a time: 4,000 scored prompt tokens would need 750 MiB at 49,152 ids each."""


class ReferenceRunner:
    """The `Runner` that NumPy is.

    Args:
        spec, program: The model.
        weights: Its tensors in float32 by canonical name, rows first. They are used in place, not copied.
        num_blocks: Usable blocks, ids 1 to `num_blocks`; the null block comes on top.
        block_size: Tokens per block, any number.
        kv_cache_dtype: What keys and values are rounded to when stored.
        kv_skip_layers: Layers that a quantised cache leaves in 16 bit.
        poison: Start all storage and every buffer as NaN, and fill a step's new blocks with NaN before use, so that a
            read of something never written ends in an assertion.
    """

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: Mapping[WeightName, Float32],
        *,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: KVDtype = "f32",
        kv_skip_layers: Sequence[int] = (),
        poison: bool = False,
    ) -> None:
        self._spec = spec
        self._program = program
        self._poison = poison
        self._kv = KVStorage(
            spec,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=kv_cache_dtype,
            skip_layers=kv_skip_layers,
            poison=poison,
        )
        self._ropes = (RopeTable(spec.rope), RopeTable(spec.local_rope or spec.rope))
        self._group_of_layer = {layer: index for index, group in enumerate(spec.kv_groups) for layer in group.layers}
        self._weights = weights
        self._arithmetic = choose_row_arithmetic(_product_shapes(program, weights, spec.head_dim))
        self._products = {
            name: RowMatmul(weights[name], self._arithmetic) for op in program.ops for name in product_weights(op)
        }
        self._first_selected_op = _first_selected_op(program)
        self._result: StepResult | None = None

    @property
    def arithmetic(self) -> RowArithmetic:
        """How matrix products are made row-invariant on this machine; `reason` says why."""
        return self._arithmetic

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV storage, the null block included."""
        return self._kv.num_bytes

    def submit(self, plan: StepPlan) -> None:
        """Do a step; NumPy has no second thread to leave it to."""
        self._result = self.execute(plan)

    def collect(self) -> StepResult:
        """Return the result of the step in flight."""
        assert self._result is not None, "no step is in flight"
        result, self._result = self._result, None
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Do one step and return what it chose."""
        assert self._result is None, "one step is in flight at most"
        inputs = read_step_inputs(plan, block_size=self._kv.block_size, num_blocks=self._kv.num_blocks)
        if self._poison:
            self._kv.poison(plan.new_blocks)
        self._kv.copy(plan.copies)
        answers = _Answers(plan)
        if plan.num_tokens:  # else a step of copies alone
            self._run_program(inputs, answers)
        return answers.result()

    def read_kv(self, layer: int, block_ids: Sequence[int], num_tokens: int) -> tuple[Stored, ...]:
        """Return keys and values of positions 0 to `num_tokens - 1` of a block table, as `KVStorage.read_kv` does."""
        return self._kv.read_kv(layer, block_ids, num_tokens)

    def _run_program(self, inputs: StepInputs, answers: _Answers) -> None:
        """Run the ops up to `SelectRows` over all rows, then the rest over tiles of the selected rows."""
        buffers = self._new_buffers("token", len(inputs.token_ids))
        for op in self._program.ops[: self._first_selected_op]:
            self._run(op, buffers, inputs, inputs.selected_rows)
        for first in range(0, len(inputs.selected_rows), MAX_LOGITS_ROWS):
            rows = inputs.selected_rows[first : first + MAX_LOGITS_ROWS]
            selected = buffers | self._new_buffers("selected", len(rows))
            for op in self._program.ops[self._first_selected_op :]:
                self._run(op, selected, inputs, rows)
            answers.add(first, selected[self._program.logits])

    def _new_buffers(self, rows: str, num_rows: int) -> dict[BufferName, Float32]:
        buffers = {
            name: np.empty((num_rows, buffer.width), np.float32)
            for name, buffer in self._program.buffers.items()
            if buffer.rows == rows
        }
        if self._poison:
            for buffer in buffers.values():
                buffer.fill(np.nan)
        return buffers

    def _run(  # noqa: C901, PLR0912 - one case for each kind of op
        self, op: Op, buffers: dict[BufferName, Float32], inputs: StepInputs, selected_rows: NDArray[np.int32]
    ) -> None:
        """Execute one op. Mutates: the buffer it writes, and the KV storage for `RopeStore`."""
        match op:
            case Embed():
                buffers[op.out][...] = reference_ops.embed(inputs.token_ids, self._weights[op.weight], op.scale)
            case EmbedPosition():
                buffers[op.out][...] = self._weights[op.weight][inputs.positions]
            case LayerNorm():
                weight, bias = self._weights[op.weight], self._weights[op.bias]
                buffers[op.out][...] = reference_ops.layer_norm(buffers[op.x], weight, bias, op.eps)
            case RmsNorm():
                buffers[op.out][...] = reference_ops.rms_norm(buffers[op.x], self._weights[op.weight], op.eps)
            case HeadRmsNorm():
                columns = buffers[op.x][:, op.offset : op.offset + op.num_heads * op.head_dim]
                heads = columns.reshape(-1, op.num_heads, op.head_dim)
                columns[...] = reference_ops.rms_norm(heads, self._weights[op.weight], op.eps).reshape(columns.shape)
            case Linear():
                self._linear(op, buffers[op.x], buffers[op.out])
            case RopeStore():
                self._rope_store(op, buffers[op.qkv], inputs, None if op.sink_q is None else buffers[op.sink_q])
            case Attend():
                for request in inputs.requests:
                    sink_q = None if op.sink_q is None else buffers[op.sink_q][request.rows]
                    buffers[op.out][request.rows] = self._attend(op, buffers[op.qkv][request.rows], sink_q, request)
            case Add():
                buffers[op.x] += buffers[op.y]
            case Activate():
                buffers[op.out][...] = reference_ops.activate(
                    buffers[op.x], op.kind, has_gate=op.has_gate, num_parts=op.num_parts
                )
            case SoftCap():
                buffers[op.x][...] = reference_ops.soft_cap(buffers[op.x], op.cap)
            case Route():
                buffers[op.out][...] = reference_ops.route(
                    buffers[op.x], num_active=op.num_active, is_normalised=op.is_normalised
                )
            case ExpertLinear():
                self._expert_linear(op, buffers[op.x], buffers[op.routes], buffers[op.out])
            case Combine():
                self._combine(op, buffers[op.x], buffers[op.routes], buffers[op.out])
            case SelectRows():
                buffers[op.out][...] = buffers[op.x][selected_rows]

    def _linear(self, op: Linear, x: Float32, out: Float32) -> None:
        """Write the products of all weights of the op side by side."""
        first = 0
        for index, name in enumerate(op.weights):
            product = self._products[name](x)
            if op.biases:
                product += self._weights[op.biases[index]]
            out[:, first : first + product.shape[1]] = product
            first += product.shape[1]
        assert first == out.shape[1], "the weights fill the buffer"

    def _expert_linear(self, op: ExpertLinear, x: Float32, routes: Float32, out: Float32) -> None:
        """Multiply the rows of each expert together. A row's bits are the same whichever rows come with it."""
        out_parts = out.reshape(len(out), op.num_active, -1)
        parts = x.reshape(len(x), op.num_active, -1) if op.is_split else x[:, None]
        for expert, names in enumerate(op.weights):
            rows, places = np.nonzero(routes[:, : op.num_active] == expert)
            if not len(rows):
                continue
            own = parts[rows, places if op.is_split else 0]
            out_parts[rows, places] = np.concatenate([self._products[name](own) for name in names], axis=1)

    @staticmethod
    def _combine(op: Combine, x: Float32, routes: Float32, out: Float32) -> None:
        parts = x.reshape(len(x), op.num_active, -1)
        out[...] = 0
        for place in range(op.num_active):
            out += routes[:, op.num_active + place, None] * parts[:, place]

    def _rope_store(self, op: RopeStore, qkv: Float32, inputs: StepInputs, sink_q: Float32 | None) -> None:
        num_heads, num_kv_heads, head_dim = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim
        heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
        if sink_q is not None:
            sink_positions = np.full_like(inputs.positions, op.sink_position)
            turned = reference_ops.rotate(heads[:, :num_heads], *self._ropes[op.is_local].cos_sin(sink_positions))
            if is_transformed(self._kv.dtype_of(op.layer)):
                turned = hadamard_inverse(turned)
            sink_q[...] = turned.reshape(sink_q.shape)
        cos, sin = self._ropes[op.is_local].cos_sin(inputs.positions)
        heads[:, :num_heads] = reference_ops.rotate(heads[:, :num_heads], cos, sin)
        keys = reference_ops.rotate(heads[:, num_heads : num_heads + num_kv_heads], cos, sin)
        values = heads[:, num_heads + num_kv_heads :]
        if is_transformed(self._kv.dtype_of(op.layer)):
            heads[:, :num_heads] = hadamard_inverse(heads[:, :num_heads])
            keys, values = hadamard(keys), hadamard(values)
        block_ids = inputs.slot_block_ids[self._group_of_layer[op.layer]]
        self._kv.write(op.layer, block_ids, inputs.slot_places, keys, values)

    def _attend(self, op: Attend, qkv: Float32, sink_q: Float32 | None, request: RequestRows) -> Float32:
        num_heads, head_dim = self._spec.num_heads, self._spec.head_dim
        block_ids = request.block_ids[self._group_of_layer[op.layer]]
        keys, values = self._kv.gather(op.layer, block_ids, request.context_length)
        attended = attend(
            qkv[:, : num_heads * head_dim].reshape(len(qkv), num_heads, head_dim),
            keys,
            values,
            start_position=request.start_position,
            scale=op.scale,
            window=op.window,
            softcap=op.softcap,
            sparse_blocks=op.sparse_blocks,
            num_sinks=op.num_sinks,
            sink_queries=None if sink_q is None else sink_q.reshape(len(qkv), num_heads, head_dim),
            arithmetic=self._arithmetic,
        )
        if is_transformed(self._kv.dtype_of(op.layer)):
            attended = hadamard_inverse(attended)
        return attended.reshape(len(qkv), num_heads * head_dim)


class _Answers:
    """Collects a step's samples and prompt scores as tiles of logits come by."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._samples: list[SampledToken | None] = [None] * len(plan.samples)
        self._scores: list[list[TokenLogprobs]] = [[] for _ in plan.prompt_logprobs]

    def add(self, first_row: int, logits: Float32) -> None:
        """Use the logits `[num_rows, vocab_size]` of the selected rows from `first_row` on."""
        rows = range(first_row, first_row + len(logits))
        for index, one in enumerate(self._plan.samples):
            if one.logits_row in rows:
                self._samples[index] = sample(logits[one.logits_row - first_row], one)
        for scores, wanted in zip(self._scores, self._plan.prompt_logprobs, strict=True):
            # Tiles come in order, so what is scored so far says which target is next.
            while len(scores) < len(wanted.target_token_ids) and wanted.first_logits_row + len(scores) in rows:
                row = logits[wanted.first_logits_row + len(scores) - first_row]
                check_logits(row, wanted.request_id, "scoring the prompt")
                scores.append(token_logprobs(row, wanted.target_token_ids[len(scores)], wanted.num_top))

    def result(self) -> StepResult:
        samples = tuple(one for one in self._samples if one is not None)
        assert len(samples) == len(self._samples), "a sample names a row that is not selected"
        for scores, wanted in zip(self._scores, self._plan.prompt_logprobs, strict=True):
            assert len(scores) == len(wanted.target_token_ids), "a scored row is not selected"
        return StepResult(
            step=self._plan.step, samples=samples, prompt_logprobs=tuple(tuple(scores) for scores in self._scores)
        )


def _first_selected_op(program: Program) -> int:
    """Return the index of the op after which all work is on selected rows."""
    selects = [index for index, op in enumerate(program.ops) if isinstance(op, SelectRows)]
    assert len(selects) == 1, "a program selects rows once"
    return selects[0]


def _product_shapes(program: Program, weights: Mapping[WeightName, Float32], head_dim: int) -> list[Shape]:
    """Return the shapes of all products that the program needs."""
    names = {name for op in program.ops for name in product_weights(op)}
    widths = {weights[name].shape[1] for name in names}
    return [*((panel_rows(width), width) for width in widths), *attention_shapes(head_dim)]
