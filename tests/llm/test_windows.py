"""Models whose layers see a window: long texts in a pool that holds little more than the window."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.testing.tiny_models import TinyModel, write_hf_model

WINDOW = 64
NUM_BLOCKS = 12
"""ceil((64 - 1 + 64) / 16) + 1 = 9 blocks hold a request whatever its length; a few more, as people round up."""

PROMPT = [(7 * place + 3) % 500 for place in range(1000)]
NUM_TOKENS = 4000
CACHE_IN_F32 = {"kv_cache_dtype": "f32", "weight_dtype": "f32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    model = TinyModel(architecture="mistral", sliding_window=WINDOW, max_position=8192)
    return str(write_hf_model(model, tmp_path_factory.mktemp("windowed") / "model"))


def engine(folder: str, runner: str, **options: object) -> LLM:
    return LLM(folder, runner=runner, max_num_batched_tokens=64, max_num_seqs=4, **options)


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("runner", ["native", "reference"])
def test_four_thousand_tokens_in_twelve_blocks_equal_transformers(folder, runner):
    llm = engine(folder, runner, num_blocks=NUM_BLOCKS, **CACHE_IN_F32)
    assert llm.card.max_model_len == 8192, "the window takes nothing from the length"
    num_answer = (NUM_TOKENS if runner == "native" else 1500) - len(PROMPT)

    answer = generate(llm, PROMPT, num_answer)

    assert len(PROMPT) > NUM_BLOCKS * 16, "the pool is much smaller than the prompt alone"
    logits = transformers_logits(folder, [*PROMPT, *answer])[len(PROMPT) - 1 : -1]
    highest = np.sort(logits, axis=1)[:, -2:]
    is_clear = highest[:, 1] - highest[:, 0] > 1e-4
    assert is_clear.mean() > 0.99
    assert (logits.argmax(axis=1) == answer)[is_clear].all()


def test_a_second_turn_hits_what_is_left_of_the_first(folder):
    llm = engine(folder, "native", num_blocks=40)
    cold = engine(folder, "native", num_blocks=40, enable_prefix_caching=False)
    answer = generate(llm, PROMPT, 16)
    second = [*PROMPT, *answer, 5, 6, 7]

    output = llm.generate({"prompt_token_ids": second}, SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))

    assert output[0].num_cached_tokens >= len(PROMPT) - 16, "the blocks of the window are all a hit needs"
    assert output[0].outputs[0].token_ids == generate(cold, second, 32)


def transformers_logits(folder: str, token_ids: list[int]) -> np.ndarray:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()
