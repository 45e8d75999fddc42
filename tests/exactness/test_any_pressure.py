"""Any small model under any pressure answers as it does alone: what nobody thought of putting together.

The matrix beside this file checks each way to keep less under each pressure; here models, prompts and pressures are
drawn, several at once. `OCTAVO_CAMPAIGN=1` draws new ones each time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.engine import KVDtype
from octavo.core.kv_cache import GroupSpec
from octavo.core.sampling import SamplingParams
from octavo.core.step import NULL_BLOCK
from octavo.models.decoder import emit_decoder
from octavo.models.kv_record import is_quantised
from octavo.models.sparse import with_sparse_blocks
from octavo.models.spec import Mixture
from octavo.runtime.native_runner import NativeRunner
from octavo.testing.exact_runs import ExactRun, Pressure, run
from octavo.testing.native_probe import pack_arrays
from octavo.testing.random_weights import RandomModel, make_random_model

VOCAB_SIZE = 96
MAX_TOKENS = 24
DTYPES: tuple[KVDtype, ...] = ("f32", "f16", "bf16", "int8", "fp8_e4m3", "int4")
LENGTHS = (1, 3, 15, 16, 17, 31, 32, 33, 60, 100, 150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A model, how its cache is held, and what it is asked."""

    model: RandomModel
    dtype: KVDtype
    skip_layers: tuple[int, ...]
    prompts: list[list[int]]
    params: SamplingParams

    @property
    def max_model_len(self) -> int:
        return max(map(len, self.prompts)) + MAX_TOKENS

    def run(self, params: SamplingParams, pressure: Pressure, *, num_rounds: int = 1) -> ExactRun:
        packed = pack_arrays(self.model.weights, self.model.program, weight_dtype="f32")

        def make_runner(pressure: Pressure) -> NativeRunner:
            return NativeRunner(
                self.model.spec,
                self.model.program,
                packed,
                num_blocks=pressure.num_blocks,
                block_size=pressure.block_size,
                kv_cache_dtype=self.dtype,
                kv_skip_layers=self.skip_layers,
                threads=pressure.threads,
                max_num_batched_tokens=pressure.max_num_batched_tokens,
                max_num_seqs=pressure.max_num_seqs,
                poison=True,
            )

        return run(self.model.spec, make_runner, self.prompts, params, pressure, num_rounds=num_rounds)


@st.composite
def models(draw: st.DrawFn) -> RandomModel:
    """Draw a model: heads, and one of the ways to keep or read less."""
    num_heads, num_kv_heads = draw(st.sampled_from([(4, 2), (4, 1), (6, 2), (2, 2), (8, 2)]))
    num_layers = draw(st.integers(2, 5))
    window = st.sampled_from([2, 5, 16, 17, 33, 48])
    way = draw(st.sampled_from(["dense", "windows", "window and sinks", "sparse"]))
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([8, 12, 16, 20, 24, 32, 40])),
        "windows": (None,) * num_layers,
        "attention_softcap": draw(st.sampled_from([0.0, 0.0, 2.0])),
        "qk_norm": draw(st.booleans()),
        "mixture": draw(
            st.sampled_from(
                [None, None, Mixture(num_experts=5, num_active=2, expert_size=32, is_normalised=True)],
            )
        ),
    }
    if way == "windows":
        sizes["windows"] = draw(st.tuples(*[st.none() | window] * num_layers))
    if way == "window and sinks":
        sizes["window_and_sinks"] = draw(window), draw(st.sampled_from([0, 1, 4, 16, 17, 33]))
    model = make_random_model(**sizes)
    if way != "sparse":
        return model
    spec = with_sparse_blocks(model.spec, draw(st.integers(3, 6)))
    return RandomModel(spec=spec, program=emit_decoder(spec), weights=model.weights)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Draw a model and prompts that share beginnings of any length."""
    model = draw(models())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = rng.integers(0, VOCAB_SIZE, max(LENGTHS)).tolist()
    prompts = []
    for length in draw(st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=6)):
        num_shared = draw(st.integers(0, length))
        prompts.append([*shared[:num_shared], *rng.integers(0, VOCAB_SIZE, length - num_shared).tolist()])
    dtype = draw(st.sampled_from(DTYPES))
    layers = st.sets(st.integers(0, model.spec.num_layers - 1), max_size=model.spec.num_layers - 1)
    num_answers = draw(st.sampled_from([1, 1, 2, 3]))
    return Drawn(
        model=model,
        dtype=dtype,
        skip_layers=tuple(sorted(draw(layers))) if is_quantised(dtype) else (),
        prompts=prompts,
        params=SamplingParams(
            temperature=1.0 if num_answers > 1 else draw(st.sampled_from([0.0, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
            max_tokens=draw(st.integers(2, MAX_TOKENS)),
            logprobs=2,
            n=num_answers,
            seed=draw(st.integers(0, 99)),
        ),
    )


@st.composite
def pressures(draw: st.DrawFn, of: Drawn) -> Pressure:
    """Draw a pressure in which the longest of the requests just fits, or has room."""
    block_size, chunk = draw(st.sampled_from([16, 32, 48])), draw(st.sampled_from([1, 5, 16, 23, 64, 300]))
    groups = [GroupSpec(window=group.window, num_sinks=group.num_sinks) for group in of.model.spec.kv_groups]
    least = sum(group.num_blocks(of.max_model_len, block_size, chunk) for group in groups)
    return Pressure(
        max_num_batched_tokens=chunk,
        max_num_seqs=draw(st.integers(1, min(chunk, 8))),
        num_blocks=least + draw(st.sampled_from([0, 1, 2, 4, 8, 100])),
        block_size=block_size,
        is_caching=draw(st.booleans()),
        threads=draw(st.integers(1, 3)),
        max_model_len=of.max_model_len,
    )


def test_any_model_under_any_pressure_answers_as_it_does_alone() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        subject = data.draw(drawn())
        calm = Pressure(max_num_batched_tokens=512, max_model_len=subject.max_model_len)
        singles = [replace(subject.params, n=1, seed=subject.params.seed + k) for k in range(subject.params.n)]
        alone = [subject.run(params, calm) for params in singles]
        for _ in range(2):
            pressure = data.draw(pressures(subject))
            squeezed = subject.run(subject.params, pressure, num_rounds=data.draw(st.integers(1, 2)))
            for k, truth in enumerate(alone):
                assert [answers[k] for answers in squeezed.answers] == [answers[0] for answers in truth.answers]
                assert [digests[k] for digests in squeezed.kv_digests] == [digests[0] for digests in truth.kv_digests]
            seen.update(kind for kind, happened in what_happened(squeezed).items() if happened)

    check()

    assert min(seen[kind] for kind in ("preempted", "hit", "copied", "given back")) >= 10, seen


def what_happened(run: ExactRun) -> dict[str, bool]:
    return {
        "preempted": run.metrics.num_preemptions > 0,
        "hit": run.metrics.num_hit_tokens > 0,
        "copied": run.num_copies > 0,
        "given back": any(NULL_BLOCK in table.block_ids for plan in run.plans for table in plan.tables),
    }
