"""Cells of the matrix that there are not: a start and a plan refuse them, and say what to leave out."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM
from octavo.config.sources import Source, keyword_source
from octavo.errors import InvalidParameterError
from octavo.llm.plan import plan_for
from octavo.planner.question import question_from
from octavo.testing.tiny_models import TinyModel, write_hf_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parent = tmp_path_factory.mktemp("refused")
    models = {
        "full": TinyModel(num_layers=4),
        "windowed": TinyModel(architecture="mistral", sliding_window=32),
        "heads of 6": TinyModel(head_dim=6),
    }
    return {name: str(write_hf_model(model, parent / name)) for name, model in models.items()}


REFUSED = {
    "sparse under a window of the model": ("windowed", {"sparse_blocks": 4}, "sparse_blocks"),
    "sparse under a window that was asked for": (
        "full",
        {"sparse_blocks": 4, "attention_window": 64},
        "sparse_blocks",
    ),
    "a window over a window": ("windowed", {"attention_window": 64}, "attention_window"),
    "bounds of heads that are no multiple of four": ("heads of 6", {"sparse_blocks": 4}, "sparse_blocks"),
    "skipped layers of a cache in 16 bit": (
        "full",
        {"kv_cache_dtype": "f16", "kv_cache_dtype_skip_layers": (1,)},
        "kv_cache_dtype_skip_layers",
    ),
    "a skipped layer that is not there": (
        "full",
        {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": (4,)},
        "kv_cache_dtype_skip_layers",
    ),
    "sinks without a window": ("full", {"attention_sinks": 4}, "attention_sinks"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_combinations_that_are_not_there_are_refused_with_a_way_out(
    folders: dict[str, str], name: str, dtype: str
) -> None:
    model, options, param = REFUSED[name]
    asked = {"num_blocks": 300, "kv_cache_dtype": dtype, **options}

    for ask in (start, plan):
        with pytest.raises(InvalidParameterError) as caught:
            ask(folders[model], asked)
        assert caught.value.param == param and caught.value.because, ask
    ways_out = [hint.removeprefix("leave out --").replace("-", "_") for hint in caught.value.hints]
    for way_out in ways_out:
        if way_out in asked:
            start(folders[model], {key: value for key, value in asked.items() if key != way_out})


def start(folder: str, options: dict[str, Any]) -> None:
    LLM(folder, **options)


def plan(folder: str, options: dict[str, Any]) -> None:
    plan_for(question_from(keyword_source({"model": folder}), Source(name="test", values=options, spellings={})))
