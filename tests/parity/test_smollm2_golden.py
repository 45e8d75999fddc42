"""The default model against tokens and logits that another program computed from the same file.

Three readings of it: the dense interpreter, and the engine on the reference and on the native runner, with float32
weights and a float32 cache, all eight prompts in one batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.errors import OctavoError
from octavo.models.load import open_model
from octavo.models.weights import WeightSource
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.runtime.reference_weights import read_reference_weights
from octavo.testing.dense_model import DenseModel
from octavo.testing.exact_runs import KVReadingRunner, Pressure, run
from octavo.testing.hand_plans import Chunk, make_plan
from octavo.testing.real_model import find_real_model

if TYPE_CHECKING:
    from octavo.runtime.native_runner import NativeRunner

Logits = np.ndarray
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_logits" / "golden.json").read_text())
CASES = GOLDEN["cases"]
TOLERANCE = 2e-3
NUM_STEPS = 64
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])


@pytest.fixture(scope="module")
def opened():
    try:
        return open_model(find_real_model())
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")


@pytest.fixture(scope="module")
def f32_tensors(opened):
    with WeightSource(opened) as source:
        return read_reference_weights(source)


@pytest.fixture(scope="module")
def f32_packed(opened):
    pytest.importorskip("octavo.runtime._native", reason="the native module is not built")
    from octavo.runtime.native_weights import pack_weights

    with WeightSource(opened) as source:
        return pack_weights(source.read_all(), opened.program, weight_dtype="f32")


def native_runner(opened, packed, **changes) -> NativeRunner:
    from octavo.runtime.native_runner import NativeRunner

    settings = {
        "num_blocks": 128,
        "block_size": 16,
        "kv_cache_dtype": "f32",
        "threads": 2,
        "max_num_batched_tokens": 512,
        "max_num_seqs": len(CASES),
        "poison": True,
    }
    return NativeRunner(opened.spec, opened.program, packed, **(settings | changes))


def fed_with_golden_tokens(case) -> tuple[list[int], range]:
    """Return prompt and golden answer in one text, and the rows that chose each golden token."""
    token_ids = case["prompt_token_ids"] + case["greedy_token_ids"][:-1]
    return token_ids, range(len(case["prompt_token_ids"]) - 1, len(token_ids))


def check_logits(logits, case) -> None:
    assert len(logits) == len(case["steps"]) == NUM_STEPS
    assert logits.argmax(axis=1).tolist() == case["greedy_token_ids"]
    for row, step in zip(logits, case["steps"], strict=True):
        assert np.abs(row[step["top_ids"]] - step["top_logits"]).max() <= TOLERANCE
        tenth = step["top_logits"][-1]
        others = np.delete(row, step["top_ids"])
        assert others.max() <= tenth + TOLERANCE
        logprobs = row[step["top_ids"]] - np.logaddexp.reduce(row.astype(np.float64))
        assert np.abs(logprobs - step["top_logprobs"]).max() <= TOLERANCE


def test_file_is_read_as_the_model_it_is(opened):
    spec = opened.spec

    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.num_parameters, spec.max_position, spec.tie_embeddings) == (134_515_008, 8192, True)
    assert spec.eos_token_ids == (2,)


@each_case
def test_dense_logits_equal_the_golden_ones(opened, f32_tensors, case):
    """All 64 steps in one dense pass: the row before each golden token must have chosen it."""
    token_ids, rows = fed_with_golden_tokens(case)

    check_logits(DenseModel(opened, f32_tensors).logits(token_ids, rows=rows), case)


def native_logits(runner: NativeRunner, case) -> Logits:
    """Return the logits of the rows that chose each golden token, from two steps."""
    token_ids, rows = fed_with_golden_tokens(case)
    table = list(range(1, 1 + -(-len(token_ids) // 16)))
    # Scored rows are those whose logits are computed; what they are scored against does not matter.
    before = Chunk("only", token_ids[: rows[0]], tables=[table], sample=None)
    scored = Chunk("only", token_ids[rows[0] :], start=rows[0], tables=[table], sample=None, targets=[0] * NUM_STEPS)

    runner.execute(make_plan([before], new_blocks=table))
    runner.execute(make_plan([scored]))
    return runner.read_buffer("logits", NUM_STEPS)


@each_case
def test_native_logits_equal_the_golden_ones(opened, f32_packed, case):
    check_logits(native_logits(native_runner(opened, f32_packed, max_selected_rows=NUM_STEPS), case), case)


def test_default_arithmetic_departs_from_the_golden_tokens_only_at_near_ties(opened):
    """Weights as stored, int8 activations, f16 cache; docs/quality.md has the figures on more text."""
    pytest.importorskip("octavo.runtime._native", reason="the native module is not built")
    from octavo.runtime.native_weights import pack_weights

    with WeightSource(opened) as source:
        packed = pack_weights(source.read_all(), opened.program)
    runner = native_runner(opened, packed, kv_cache_dtype="f16", max_selected_rows=NUM_STEPS)
    gaps, errors = [], []
    for case in CASES:
        for row, step in zip(native_logits(runner, case), case["steps"], strict=True):
            logprobs = row[step["top_ids"]] - np.logaddexp.reduce(row.astype(np.float64))
            errors.append(abs(logprobs[0] - step["top_logprobs"][0]))
            if row.argmax() != step["top_ids"][0]:
                gaps.append(step["top_logits"][0] - step["top_logits"][1])

    assert len(gaps) <= 0.07 * len(errors)
    assert max(gaps, default=0.0) < 0.5
    assert 0.0 < np.mean(errors) < 0.05


@pytest.mark.parametrize("runner", ["reference", "native"])
def test_engine_gives_the_golden_tokens_and_log_probabilities(opened, runner, request):
    """The smallest gap between two likeliest tokens is 0.003, so nothing but equal tokens is right."""
    if runner == "native":
        packed = request.getfixturevalue("f32_packed")
    else:
        tensors = request.getfixturevalue("f32_tensors")

    def make_runner(pressure: Pressure) -> KVReadingRunner:
        if runner == "native":
            return native_runner(opened, packed, max_num_batched_tokens=pressure.max_num_batched_tokens)
        return ReferenceRunner(opened.spec, opened.program, tensors, num_blocks=128, block_size=16, poison=True)

    ran = run(
        opened.spec,
        make_runner,
        [case["prompt_token_ids"] for case in CASES],
        SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True, logprobs=10),
        Pressure(max_num_batched_tokens=64, max_num_seqs=len(CASES), num_blocks=128),
    )

    assert ran.max_requests_in_a_step == len(CASES), "the prompts ran together"
    assert max(len(case["prompt_token_ids"]) for case in CASES) > 64, "a prompt was cut into chunks"
    for case, (answer,) in zip(CASES, ran.answers, strict=True):
        assert [token_id for token_id, _, _ in answer] == case["greedy_token_ids"]
        for (_, _, top), step in zip(answer, case["steps"], strict=True):
            found = dict(top)
            # Around the tenth, two ids may have changed places.
            for token_id, logprob in zip(step["top_ids"], step["top_logprobs"], strict=True):
                if token_id in found:
                    assert abs(found[token_id] - logprob) <= TOLERANCE
                else:
                    assert abs(min(found.values()) - logprob) <= TOLERANCE
