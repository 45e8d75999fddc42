"""The default model against logits that another program computed from the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import OctavoError
from octavo.testing.dense_model import DenseModel
from octavo.testing.real_model import find_real_model

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_logits" / "golden.json").read_text())
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model():
    try:
        return DenseModel.load(find_real_model())
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")


def test_file_is_read_as_the_model_it_is(model):
    spec = model.model.spec

    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.num_parameters, spec.max_position, spec.tie_embeddings) == (134_515_008, 8192, True)
    assert spec.eos_token_ids == (2,)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["prompt"][:20])
def test_top_logits_and_greedy_tokens_equal_the_golden_ones(model, case):
    """All 64 steps in one dense pass: the row before each golden token must have chosen it."""
    chosen = case["greedy_token_ids"]
    ids = case["prompt_token_ids"] + chosen[:-1]
    first = len(case["prompt_token_ids"]) - 1

    logits = model.logits(ids, rows=range(first, len(ids)))

    assert len(logits) == len(case["steps"]) == 64
    assert logits.argmax(axis=1).tolist() == chosen
    for row, step in zip(logits, case["steps"], strict=True):
        assert np.abs(row[step["top_ids"]] - step["top_logits"]).max() <= TOLERANCE
        tenth = step["top_logits"][-1]
        others = np.delete(row, step["top_ids"])
        assert others.max() <= tenth + TOLERANCE
        logprobs = row[step["top_ids"]] - np.logaddexp.reduce(row.astype(np.float64))
        assert np.abs(logprobs - step["top_logprobs"]).max() <= TOLERANCE
