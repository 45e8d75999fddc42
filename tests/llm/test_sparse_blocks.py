"""`--sparse-blocks` from the option to the answer: dense while a context is short, another answer after that."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import InvalidParameterError
from octavo.testing.tiny_models import TinyModel, write_hf_model

SHORT, LONG = [[(7 * place + 3) % 500 for place in range(length)] for length in (40, 400)]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_hf_model(TinyModel(num_layers=4), tmp_path_factory.mktemp("sparse") / "model"))


def answer(llm: LLM, prompt: list[int]):
    return llm.generate({"prompt_token_ids": prompt}, PARAMS)[0].outputs[0].logprobs


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_the_option_reads_less_of_a_long_context_and_all_of_a_short_one(folder, runner):
    dense, sparse = (LLM(folder, runner=runner, sparse_blocks=each) for each in (None, 4))

    assert answer(sparse, SHORT) == answer(dense, SHORT)
    assert answer(sparse, LONG) != answer(dense, LONG)
    assert "lossy" in next(line.reason for line in sparse.card.lines if line.name == "sparse_blocks")


def test_blocks_that_are_no_whole_tiles_are_refused_and_the_hint_works(folder):
    with pytest.raises(InvalidParameterError) as caught:
        LLM(folder, runner="reference", block_size=24, sparse_blocks=4)

    assert caught.value.param == "block_size" and "`--block-size 32`" in caught.value.hints
    assert answer(LLM(folder, runner="reference", block_size=32, sparse_blocks=4), SHORT)
