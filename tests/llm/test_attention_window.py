"""`--attention-window` over a model that sees all: long chats in a few blocks, and nothing changed before the gap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import InvalidParameterError
from octavo.models.attention_window import with_attention_window
from octavo.models.decoder import emit_decoder
from octavo.models.load import open_model
from octavo.testing.dense_model import DenseModel
from octavo.testing.tiny_models import TinyModel, write_hf_model

WINDOW, SINKS = 64, 20
NUM_BLOCKS = 12
"""ceil(20 / 16) + ceil((64 - 1 + 64) / 16) + 1 = 11 blocks hold a request whatever its length."""

PROMPT = [(7 * place + 3) % 500 for place in range(500)]
EXACT = {"kv_cache_dtype": "f32", "weight_dtype": "f32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_hf_model(TinyModel(max_position=8192), tmp_path_factory.mktemp("full") / "model"))


def engine(folder: str, **options: object) -> LLM:
    return LLM(folder, max_num_batched_tokens=64, max_num_seqs=4, **options)


def windowed(folder: str, **options: object) -> LLM:
    return engine(folder, attention_window=WINDOW, attention_sinks=SINKS, **options)


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids


@pytest.mark.parametrize(("runner", "num_tokens"), [("native", 3000), ("reference", 300)])
def test_a_long_text_is_written_in_a_few_blocks_as_a_dense_pass_would(folder, runner, num_tokens):
    llm = windowed(folder, runner=runner, num_blocks=NUM_BLOCKS, **EXACT)
    assert llm.card.max_model_len == 8192, "the window takes nothing from the length"
    assert llm.config_document()["max_request_blocks"] == 11

    answer = generate(llm, PROMPT, num_tokens)

    assert len(PROMPT) > 2 * NUM_BLOCKS * 16, "the pool is much smaller than the prompt alone"
    dense = DenseModel.load(Path(folder))
    spec = with_attention_window(dense.model.spec, window=WINDOW, num_sinks=SINKS)
    dense.model = replace(dense.model, spec=spec, program=emit_decoder(spec))
    text = [*PROMPT, *answer]
    logits = dense.logits(text, range(len(PROMPT) - 1, len(text) - 1))
    highest = np.sort(logits, axis=1)[:, -2:]
    is_clear = highest[:, 1] - highest[:, 0] > 1e-3
    assert is_clear.mean() > 0.9
    assert (logits.argmax(axis=1) == answer)[is_clear].all()


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_answers_are_those_of_full_attention_until_a_gap_opens(folder, runner):
    asked = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=5)
    prompt = {"prompt_token_ids": PROMPT[:40]}
    engines = (engine(folder, runner=runner), windowed(folder, runner=runner))
    full, cut = (each.generate(prompt, asked)[0].outputs[0] for each in engines)

    # The last query that sees everything is at WINDOW + SINKS - 1; its token is the next one.
    num_same = WINDOW + SINKS - 40 + 1
    assert cut.token_ids[:num_same] == full.token_ids[:num_same]
    assert cut.logprobs[:num_same] == full.logprobs[:num_same]
    assert cut.logprobs != full.logprobs, "behind the gap it is another model"


def test_a_second_turn_hits_sinks_and_window_of_the_first(folder):
    llm, cold = windowed(folder, num_blocks=40), windowed(folder, num_blocks=40, enable_prefix_caching=False)
    second = [*PROMPT, *generate(llm, PROMPT, 16), 5, 6, 7]

    output = llm.generate({"prompt_token_ids": second}, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))

    assert output[0].num_cached_tokens >= len(PROMPT) - 16
    assert output[0].outputs[0].token_ids == generate(cold, second, 32)


def test_the_start_card_says_that_it_is_lossy(folder):
    lines = {line.name: line for line in engine(folder, attention_window=WINDOW).card.lines}

    assert lines["attention_window"].value == f"{WINDOW} tokens" and "lossy" in lines["attention_window"].reason
    assert lines["attention_sinks"].value == "4 tokens"


@pytest.mark.parametrize("asked", [{"attention_window": 64}, {"attention_window": 64, "attention_sinks": 0}])
def test_a_model_with_windows_of_its_own_is_refused(tmp_path, asked):
    folder = write_hf_model(TinyModel(architecture="mistral", sliding_window=32), tmp_path / "model")

    with pytest.raises(InvalidParameterError, match="window of 32 tokens of its own") as caught:
        LLM(str(folder), **asked)
    assert caught.value.param == "attention_window"


def test_caches_of_different_windows_are_told_apart(folder):
    spec = open_model(Path(folder)).spec
    others = [
        with_attention_window(spec, window=window, num_sinks=sinks) for window, sinks in ((64, 4), (64, 5), (65, 4))
    ]

    assert len({repr(each) for each in (spec, *others)}) == 4
    prompts = {"prompt_token_ids": PROMPT[:200]}
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
    outputs = [
        engine(folder, attention_window=64, attention_sinks=sinks).generate(prompts, params)[0].outputs[0].logprobs
        for sinks in (0, 4)
    ]
    assert outputs[0] != outputs[1], "sinks matter to what is computed"
