"""Tiny models of every supported family: the same logits as Hugging Face transformers on the CPU.

Three readings of a program are compared with it: the dense interpreter (no cache at all), and the reference and native
runners, which store keys and values in blocks. Both formats of a model are held against each other as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo.models.load import open_model
from octavo.models.weights import WeightSource
from octavo.runtime.divergence import log_softmax
from octavo.testing.dense_model import DenseModel
from octavo.testing.parity import BLOCK_SIZE, exact_runner, tolerance
from octavo.testing.scored_text import score_text
from octavo.testing.tiny_gguf import round_through, write_gguf_model
from octavo.testing.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, TinyModel, write_hf_model

LENGTHS = (1, 15, 16, 17, 31, 33, 200)
LLAMA_3 = TinyModel(rope_theta=500_000.0, rope_scaling=LLAMA3_ROPE, num_heads=8, num_kv_heads=2, head_dim=16)
MODELS = {
    "llama": TinyModel(),
    "llama tied": TinyModel(tie_embeddings=True),
    "llama full heads": TinyModel(num_kv_heads=4),
    "llama single kv head": TinyModel(num_kv_heads=1),
    "llama biases": TinyModel(attention_bias=True, mlp_bias=True),
    "llama narrow heads": TinyModel(head_dim=12),
    "llama linear": TinyModel(rope_scaling=LINEAR_ROPE),
    "llama 3": LLAMA_3,
    "llama yarn": TinyModel(rope_scaling=YARN_ROPE, max_position=256),
    "llama yarn mscale": TinyModel(
        rope_scaling={**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}, max_position=256
    ),
    "mistral": TinyModel(architecture="mistral"),
    "mistral window": TinyModel(architecture="mistral", sliding_window=20),
    "qwen2": TinyModel(architecture="qwen2"),
    "qwen2 tied": TinyModel(architecture="qwen2", tie_embeddings=True, rope_theta=1e6),
    "qwen3": TinyModel(architecture="qwen3", head_dim=32),
    "qwen3 biases": TinyModel(architecture="qwen3", attention_bias=True, tie_embeddings=True),
}
WITHOUT_GGUF = {"llama yarn mscale"}  # that format has no such field

Logits = np.ndarray


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """Return a model's name, its folder, and transformers' logits as a function of token ids."""
    folder = write_hf_model(MODELS[request.param], tmp_path_factory.mktemp("parity") / "model")
    return request.param, folder, transformers_logits(folder)


def transformers_logits(folder) -> Callable[[list[int]], Logits]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits(token_ids: list[int]) -> Logits:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].numpy()

    return logits


def tokens(length, seed=0, vocab_size=512):
    return np.random.default_rng([seed, length]).integers(0, vocab_size, length).tolist()


def test_dense_logits_equal_transformers(case):
    _, folder, reference = case
    model = DenseModel.load(folder)

    for length in LENGTHS:
        wanted = reference(tokens(length))
        found = model.logits(tokens(length))
        assert np.abs(found - wanted).max() <= tolerance(wanted), f"at length {length}"


@pytest.mark.parametrize("name", ["reference", "native"])
def test_paged_logprobs_equal_transformers(case, name):
    _, folder, reference = case
    model = open_model(folder)
    runner = exact_runner(name, model, max(LENGTHS))

    for length in LENGTHS:
        wanted = reference(tokens(length))
        found = score_text(runner, model.spec, tokens(length), block_size=BLOCK_SIZE)
        assert np.abs(found - log_softmax(wanted)).max() <= tolerance(wanted), f"at length {length}"


def test_logits_depend_on_every_token(case):
    """Guards the tests above: random weights of this size make every earlier token matter to the last logits."""
    name, _, reference = case
    window = MODELS[name].sliding_window
    ids = tokens(15 if window is None else min(15, window))
    wanted = reference(ids)[-1]

    for place in range(len(ids)):
        changed = reference([*ids[:place], (ids[place] + 1) % 512, *ids[place + 1 :]])[-1]
        assert np.abs(changed - wanted).max() > 100 * tolerance(wanted)


def test_gguf_file_of_the_same_weights_gives_the_same_logits(case, tmp_path):
    """OPN-39: five prompts a file; rows of q and k put back in order, a tied head taken from the embedding."""
    name, folder, reference = case
    if name in WITHOUT_GGUF:
        pytest.skip("the format has no field for this scaling")
    path = write_gguf_model(MODELS[name], tmp_path / "tiny.gguf")
    file, files = DenseModel.load(path), DenseModel.load(folder)

    for seed in range(5):
        ids = tokens(40, seed=seed)
        wanted = reference(ids)
        assert np.abs(file.logits(ids) - wanted).max() <= tolerance(wanted)
        if name != "llama 3":  # its divisors are float32 in the file, doubles from the configuration
            assert np.array_equal(file.logits(ids), files.logits(ids))


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_quantised_gguf_gives_the_logits_of_the_float_weights_it_stands_for(tmp_path, architecture, kind):
    model = TinyModel(architecture=architecture, hidden_size=256, intermediate_size=256, num_layers=1, weight_std=0.06)
    folder = write_hf_model(model, tmp_path / "model", tensors=round_through(model, kind))
    path = write_gguf_model(model, tmp_path / "tiny.gguf", kind=kind)

    file, files = DenseModel.load(path), DenseModel.load(folder)

    assert file.model.tensors["layers.0.q"].kind == kind
    assert np.array_equal(file.logits(tokens(33)), files.logits(tokens(33)))


def test_rows_left_in_the_files_order_would_be_noticed(tmp_path):
    """Guards OPN-39: without putting q and k back in order the logits are far off."""
    path = write_gguf_model(LLAMA_3, tmp_path / "tiny.gguf")
    model = DenseModel.load(path)
    wanted = model.logits(tokens(33))

    opened = open_model(path)
    unordered = {name: replace(entry, interleaved_heads=0) for name, entry in opened.tensors.items()}
    with WeightSource(replace(opened, tensors=unordered)) as source:
        wrong = DenseModel(opened, {tensor.name: tensor.to_f32() for tensor in source.read_all()})

    assert np.abs(wrong.logits(tokens(33)) - wanted).max() > 1000 * tolerance(wanted)
