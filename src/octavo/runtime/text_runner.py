"""TextRunner: one text through the native kernels, without a scheduler, for looking at every distribution.

A runner with a KV dtype of its own, over weights that others share. Texts are read in chunks; what the model holds
likely after each token is handed out as logits, which an engine would never keep.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np
import numpy.typing as npt

from octavo.config.engine import NATIVE_TILE_TOKENS, KVDtype
from octavo.core.sampling import SamplingParams
from octavo.core.step import GroupTables, SampleRow, StepPlan
from octavo.models.program import Program
from octavo.models.spec import ModelSpec
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import HeldWeights
from octavo.units import RequestId, cdiv

Logits = npt.NDArray[np.float32]

CHUNK_TOKENS = 256
"""Rows of logits held at once: for 49,152 ids 50 MB."""

_ID = RequestId("text")
_GREEDY = SamplingParams(temperature=0.0)


class TextRunner:
    """Reads and continues texts of up to `max_tokens` tokens, one at a time.

    Args:
        weights: Packed; may be shared with other runners.
        kv_cache_dtype: How this one holds keys and values.
    """

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: HeldWeights,
        *,
        kv_cache_dtype: KVDtype,
        max_tokens: int,
        threads: int,
    ) -> None:
        num_blocks = cdiv(max_tokens, NATIVE_TILE_TOKENS)
        num_groups = len(spec.kv_groups)
        self._tables = [range(1 + group * num_blocks, 1 + (group + 1) * num_blocks) for group in range(num_groups)]
        self._logits = program.logits
        self._runner = NativeRunner(
            spec,
            program,
            weights,
            num_blocks=num_groups * num_blocks,
            block_size=NATIVE_TILE_TOKENS,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=1,
            max_selected_rows=CHUNK_TOKENS,
        )

    def read(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """Read a text from its beginning and yield logits `[rows, vocab_size]`, a row after each token.

        Whether they make distributions is not looked at.
        """
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[start : start + CHUNK_TOKENS]
            self._runner.execute(self._plan(chunk, start, is_read=True))
            yield self._runner.read_buffer(self._logits, len(chunk))

    def prefill(self, token_ids: Sequence[int]) -> int:
        """Read a text from its beginning, and return the likeliest next token."""
        *starts, last = range(0, len(token_ids), CHUNK_TOKENS)
        for start in starts:
            self._runner.execute(self._plan(token_ids[start : start + CHUNK_TOKENS], start))
        return self._choose(token_ids[last:], last)

    def decode(self, token_id: int, *, position: int, num_tokens: int) -> tuple[list[int], float]:
        """Go on greedily from `token_id` at `position`; return the tokens after it, and the seconds they took."""
        tokens: list[int] = []
        start_s = perf_counter()
        for step in range(num_tokens):
            token_id = self._choose([token_id], position + step)
            tokens.append(token_id)
        return tokens, perf_counter() - start_s

    def _choose(self, token_ids: Sequence[int], start: int) -> int:
        return int(self._runner.execute(self._plan(token_ids, start, is_sampled=True)).samples[0].token_id)

    def _plan(
        self, token_ids: Sequence[int], start: int, *, is_read: bool = False, is_sampled: bool = False
    ) -> StepPlan:
        num_tokens = len(token_ids)
        sample = SampleRow(request_id=_ID, logits_row=0, position=start + num_tokens, params=_GREEDY, seed=0)
        return StepPlan(
            step=0,
            request_ids=(_ID,),
            query_offsets=array("i", [0, num_tokens]),
            start_positions=array("i", [start]),
            token_ids=array("i", token_ids),
            tables=tuple(
                GroupTables(block_ids=array("i", table), offsets=array("i", [0, len(table)])) for table in self._tables
            ),
            selected_rows=array("i", range(num_tokens) if is_read else [num_tokens - 1] if is_sampled else []),
            samples=(sample,) if is_sampled else (),
            prompt_logprobs=(),
        )
