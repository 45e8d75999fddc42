"""NativeRunner: executes step plans with C++ kernels on the CPU, one call per step.

The bits of a request's logits depend on its own tokens, the model, the dtypes and the instruction set, never on what
else runs, how prompts are cut, where blocks lie, or the number of threads. Python only hands arrays over and wraps
answers; `csrc/executor.h` is where a step happens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.config.engine import KVDtype
from octavo.core.step import SampledToken, SampleRow, StepPlan, StepResult, TokenLogprobs
from octavo.errors import MachineError
from octavo.models.arena import lay_out
from octavo.models.kv_record import SKIPPED_LAYER_DTYPE, layer_dtypes
from octavo.models.program import BufferName, Program
from octavo.models.sparse import is_sparse_layer
from octavo.models.spec import ModelSpec
from octavo.runtime import _native
from octavo.runtime.kv_codes import STORED_AS
from octavo.runtime.native_program import model_sizes, number_program
from octavo.runtime.native_weights import HeldWeights
from octavo.runtime.sampler import no_distribution
from octavo.units import RequestId, TokenId

_RawLogprobs = tuple[int, float, int, tuple[tuple[int, float], ...]]


class NativeRunner:
    """Implements `Runner` with the kernels of `octavo.runtime._native`.

    Args:
        spec, program: The model.
        weights: Packed weights; see `native_weights.py`.
        num_blocks: Usable blocks; the pool holds the null block besides.
        block_size: Tokens per block, a multiple of 16.
        kv_cache_dtype: What keys and values are rounded to when stored.
        kv_skip_layers: Layers that a quantised cache leaves in 16 bit.
        threads: Threads that execute a step, the caller's included.
        max_num_batched_tokens: Most rows of a step.
        max_num_seqs: Most requests of a step.
        max_selected_rows: Logits rows held at once; more are computed in tiles of so many.
        isa: `auto`, `portable` or `avx2`.
        prefault: Commit the pool's memory now.
        poison: Fill activations and new blocks with NaN before each step (tests).
        is_timed: Add up the seconds of each kind of op, for benchmarks.

    Raises:
        ValueError: sizes that contradict each other, or an instruction set this machine lacks.
        MemoryError: the pool cannot be mapped.
    """

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: HeldWeights,
        *,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: KVDtype,
        kv_skip_layers: Sequence[int] = (),
        threads: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_selected_rows: int | None = None,
        isa: str = "auto",
        prefault: bool = False,
        poison: bool = False,
        is_timed: bool = False,
    ) -> None:
        num_selected = max_selected_rows or min(max_num_batched_tokens, max(max_num_seqs, 64))
        arena = lay_out(program, num_token_rows=max_num_batched_tokens, num_selected_rows=num_selected)
        numbered = number_program(program, arena)
        self.spec = spec
        self.program = program
        self._kv_dtypes = layer_dtypes(spec.num_layers, kv_cache_dtype, kv_skip_layers)
        self._block_size = block_size
        self._buffer_numbers = numbered.buffer_numbers
        self._executor = _native.Executor(
            program={
                "ops": numbered.ops,
                "buffers": numbered.buffers,
                "linears": [weights.product(*product) for product in numbered.products],
                "vectors": [weights.vector(name) for name in numbered.vectors],
                "logits": numbered.logits,
                "arena_bytes": arena.total_bytes,
            },
            sizes=model_sizes(spec),
            config={
                "num_blocks": num_blocks,
                "block_size": block_size,
                "kv_dtype": kv_cache_dtype,
                "kv_skip_layers": tuple(kv_skip_layers),
                "bounded_layers": [layer for layer in range(spec.num_layers) if is_sparse_layer(spec, layer)],
                "skipped_kv_dtype": SKIPPED_LAYER_DTYPE,
                "max_num_tokens": max_num_batched_tokens,
                "max_num_requests": max_num_seqs,
                "max_num_selected": num_selected,
                "num_threads": threads,
                "isa": isa,
                "prefault": prefault,
                "poison": poison,
                "is_timed": is_timed,
            },
        )
        self._process_id = os.getpid()
        self._worker: ThreadPoolExecutor | None = None
        self._in_flight: Future[StepResult] | None = None

    def submit(self, plan: StepPlan) -> None:
        assert self._in_flight is None, "a step is in flight"
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-step")
        self._in_flight = self._worker.submit(self._run, plan)

    def collect(self) -> StepResult:
        assert self._in_flight is not None, "no step is in flight"
        step, self._in_flight = self._in_flight, None
        return step.result()

    def execute(self, plan: StepPlan) -> StepResult:
        assert self._in_flight is None, "a step is in flight"
        return self._run(plan)

    @property
    def scratch_bytes(self) -> int:
        """Memory beside weights, activations and pool: quantised activations, partial sums, sampling."""
        return int(self._executor.scratch_bytes)

    @property
    def pool_bytes(self) -> int:
        """Size of the mapped pool; resident only as far as blocks have been written."""
        return int(self._executor.pool_bytes)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds since the start by kind of op, and of preparing steps and sampling; zeros unless `is_timed`."""
        return dict(self._executor.seconds)

    @property
    def num_shared_items(self) -> int:
        """Pieces of the last step's attention in which several requests visited the same blocks together."""
        return int(self._executor.num_shared_items)

    @property
    def activation_bytes(self) -> int:
        return int(self._executor.arena_bytes)

    def read_kv(self, layer: int, block_ids: Sequence[int], num_tokens: int) -> tuple[npt.NDArray[Any], ...]:
        """Return keys and values as stored (see `STORED_AS`): two `[num_tokens, num_kv_heads, numbers of a row]`.

        Of a quantised layer these are codes, and two arrays of scales `[num_tokens, num_kv_heads, 1]` follow.
        """
        needed = block_ids[: -(-num_tokens // self._block_size)]
        blocks = [self._executor.read_kv(block_id, layer) for block_id in needed]
        number: type[np.generic] = STORED_AS[self._kv_dtypes[layer]]
        types = (number, number, np.uint16, np.uint16)
        # Of each block: [kv_head, place, bytes], for keys, values and perhaps their scales.
        return tuple(
            np.concatenate([part.view(of_type).transpose(1, 0, 2) for part in parts])[:num_tokens]
            for of_type, parts in zip(types, zip(*blocks, strict=True), strict=False)
        )

    def read_buffer(self, name: BufferName, num_rows: int) -> npt.NDArray[np.float32]:
        """Return rows of a buffer as the last step left it; later ops may have written over it (tests)."""
        return np.asarray(self._executor.read_buffer(self._buffer_numbers[name], num_rows))

    def _run(self, plan: StepPlan) -> StepResult:
        if os.getpid() != self._process_id:
            # Threads do not survive a fork: a step would wait for them for ever.
            raise MachineError(
                "a model cannot be used in a forked process",
                because="its threads exist only in the process that loaded it",
                hints=("load it after the fork, or start processes with the spawn method",),
            )
        samples, scores = self._executor.step(
            query_offsets=plan.query_offsets,
            start_positions=plan.start_positions,
            token_ids=plan.token_ids,
            tables=[(table.block_ids, table.offsets) for table in plan.tables],
            copies=[(copy.source, copy.destination) for copy in plan.copies],
            new_blocks=plan.new_blocks,
            selected_rows=plan.selected_rows,
            samples=[_sample_fields(row) for row in plan.samples],
            scores=[(each.first_logits_row, each.num_top, each.target_token_ids) for each in plan.prompt_logprobs],
        )
        return StepResult(
            step=plan.step,
            samples=tuple(
                SampledToken(
                    request_id=row.request_id,
                    token_id=_checked(token_id, row.request_id),
                    logprobs=None if logprobs is None else _logprobs(logprobs, row.request_id),
                )
                for row, (token_id, logprobs) in zip(plan.samples, samples, strict=True)
            ),
            prompt_logprobs=tuple(
                tuple(_logprobs(each, wanted.request_id) for each in rows)
                for wanted, rows in zip(plan.prompt_logprobs, scores, strict=True)
            ),
        )


def _sample_fields(row: SampleRow) -> tuple[object, ...]:
    """Return the fields in the order that the bindings read them."""
    params = row.params
    return (
        row.logits_row,
        row.position,
        row.seed,
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        -1 if params.logprobs is None else params.logprobs,
        row.banned_token_ids,
        tuple(params.logit_bias.items()),
        row.prompt_token_ids,
        row.output_token_ids,
        row.allowed_tokens,
    )


def _logprobs(raw: _RawLogprobs, request_id: RequestId) -> TokenLogprobs:
    token_id, logprob, rank, top = raw
    return TokenLogprobs(
        token_id=_checked(token_id, request_id),
        logprob=logprob,
        rank=rank,
        top=tuple((TokenId(id_), each) for id_, each in top),
    )


def _checked(token_id: int, request_id: RequestId) -> TokenId:
    if token_id < 0:
        raise no_distribution("its logits hold NaN or infinity, or every token is banned", request_id)
    return TokenId(token_id)
