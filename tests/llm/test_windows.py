"""Models whose layers see a window: long texts in a pool that holds little more than the window.

A window group holds `ceil((64 - 1 + 64) / 16) + 1 = 9` blocks of a request whatever its length; twelve are given, as
people round up. A full group holds a block for every 16 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.core.step import NULL_BLOCK, StepPlan
from octavo.models.load import open_model
from octavo.testing.tiny_models import TinyModel, make_tokenizer, make_tokenizer_config, write_hf_model
from octavo.units import cdiv

WINDOW = 64
WINDOW_BLOCKS = 12
BLOCK_SIZE = 16

PROMPT = [(7 * place + 3) % 500 for place in range(1000)]
NUM_TOKENS = 4000
CACHE_IN_F32 = {"kv_cache_dtype": "f32", "weight_dtype": "f32"}

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3_LAYERS = {"gemma3 alternating": [SLIDING, FULL] * 2, "gemma3 one in six": [SLIDING] * 5 + [FULL]}
GROUPS = {"mistral": (1, 0), "gemma3 alternating": (1, 1), "gemma3 one in six": (5, 1)}
"""Window groups and full groups of each model."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Return the folder of each model."""
    parent = tmp_path_factory.mktemp("windowed")
    mistral = TinyModel(architecture="mistral", sliding_window=WINDOW, max_position=8192)
    folders = {"mistral": str(write_hf_model(mistral, parent / "mistral"))}
    for name, layer_types in GEMMA3_LAYERS.items():
        folders[name] = str(write_gemma3(parent / name, layer_types))
    return folders


def write_gemma3(folder: Path, layer_types: list[str]) -> Path:
    """Write a random Gemma 3; its head is its own, since with a tied one a random model repeats its last token."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=layer_types,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.125
            parameter.copy_(parameter + noise if parameter.ndim == 1 else noise)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(512)))
    (folder / "tokenizer_config.json").write_text(json.dumps(make_tokenizer_config()))
    return folder


def engine(folder: str, runner: str, **options: object) -> LLM:
    return LLM(folder, runner=runner, max_num_batched_tokens=64, max_num_seqs=4, **options)


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids


class TableLog:
    """What the tables of one request named, step by step.

    `ids` has the block that each place of each group's table had; `num_held` the most blocks that each group had at
    once.
    """

    def __init__(self, num_groups: int) -> None:
        self.ids: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self.num_held = [0] * num_groups
        self.num_null = [0] * num_groups

    def take(self, plan: StepPlan) -> None:
        assert plan.num_requests == 1
        for group, table in enumerate(plan.tables):
            held = {index: block_id for index, block_id in enumerate(table.block_ids) if block_id != NULL_BLOCK}
            self.ids[group].update(held)
            self.num_held[group] = max(self.num_held[group], len(held))
            self.num_null[group] = len(table.block_ids) - len(held)


@pytest.mark.parametrize(
    ("runner", "num_tokens"),
    [
        ("native", NUM_TOKENS),
        ("reference", 500),
        pytest.param("reference", NUM_TOKENS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", GROUPS)
def test_a_long_text_in_twelve_blocks_a_window_equals_transformers(folders, name, runner, num_tokens):
    num_window_groups, num_full_groups = GROUPS[name]
    length_blocks = cdiv(len(PROMPT) + num_tokens, BLOCK_SIZE)
    assert length_blocks == cdiv(len(PROMPT) + num_tokens - 1, BLOCK_SIZE), "full groups use all that they are given"
    num_blocks = num_window_groups * WINDOW_BLOCKS + num_full_groups * length_blocks
    groups = open_model(Path(folders[name])).spec.kv_groups
    assert sorted(group.window or 0 for group in groups) == [0] * num_full_groups + [WINDOW] * num_window_groups
    llm = engine(folders[name], runner, num_blocks=num_blocks, block_size=BLOCK_SIZE, **CACHE_IN_F32)
    log = TableLog(len(groups))
    llm.engine.subscribe_plans(log.take)

    answer = generate(llm, PROMPT, num_tokens)

    assert llm.engine.snapshot().num_usable_blocks == num_blocks
    assert {block_id for ids in log.ids for block_id in ids.values()} <= set(range(1, num_blocks + 1))
    assert sum(map(len, log.ids)) == len(groups) * length_blocks > num_blocks, "blocks were used again"
    for group, num_held, num_null in zip(groups, log.num_held, log.num_null, strict=True):
        if group.window is None:
            assert (num_held, num_null) == (length_blocks, 0)
        else:
            assert num_held <= WINDOW_BLOCKS < len(PROMPT) // BLOCK_SIZE, "the prompt alone is far more than is held"
            assert num_null >= length_blocks - WINDOW_BLOCKS
    assert llm.engine.metrics.num_preemptions == 0
    assert_greedy_in_transformers(folders[name], answer)


def assert_greedy_in_transformers(folder: str, answer: list[int]) -> None:
    logits = transformers_logits(folder, [*PROMPT, *answer])[len(PROMPT) - 1 : -1]
    highest = np.sort(logits, axis=1)[:, -2:]
    is_clear = highest[:, 1] - highest[:, 0] > 1e-4
    assert is_clear.mean() > 0.99
    assert (logits.argmax(axis=1) == answer)[is_clear].all()
    assert (highest[:, 1] - logits[np.arange(len(answer)), answer] <= 1e-4).all(), "where two are close, one of them"
    assert len(set(answer[-400:])) > 50, "a text that repeats itself would say little"


def test_the_window_takes_nothing_from_the_length(folders):
    llm = engine(folders["mistral"], "native", num_blocks=WINDOW_BLOCKS, **CACHE_IN_F32)

    assert llm.card.max_model_len == 8192
    assert llm.config_document()["max_request_blocks"] == 9


@pytest.mark.parametrize("name", GROUPS)
def test_a_second_turn_hits_what_is_left_of_the_first(folders, name):
    num_window_groups, num_full_groups = GROUPS[name]
    num_blocks = 40 * num_window_groups + 80 * num_full_groups
    assert num_blocks < sum(GROUPS[name]) * len(PROMPT) // BLOCK_SIZE, "most of the first turn has been written over"
    llm = engine(folders[name], "native", num_blocks=num_blocks)
    cold = engine(folders[name], "native", num_blocks=num_blocks, enable_prefix_caching=False)
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
    # Eager attention would hold a gigabyte of scores.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()
