"""The factory of tiny models: deterministic, and readable by the tools whose formats it writes."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import gguf
import numpy as np
import pytest

from octavo.testing.tiny_gguf import pick_kind, round_through, write_gguf_model
from octavo.testing.tiny_models import SPECIAL_TOKENS, TinyModel, make_tensors, write_hf_model, write_safetensors

FIRST_VALUES = [0.0014139260165393353, 0.04975919798016548]
BLOCKS_OF_256 = TinyModel(hidden_size=256, intermediate_size=256, num_layers=1)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_same_description_gives_the_same_files(tmp_path):
    model = TinyModel(architecture="qwen2", seed=3)

    files = {
        digest(path) for name in ("a", "b") for path in (write_hf_model(model, tmp_path / name) / "model.safetensors",)
    }
    ggufs = {digest(write_gguf_model(model, tmp_path / name, kind="q4_k")) for name in ("a.gguf", "b.gguf")}

    assert (len(files), len(ggufs)) == (1, 1)


def test_numbers_are_the_same_on_every_machine():
    first = make_tensors(TinyModel())["model.layers.1.mlp.up_proj.weight"]

    assert first[0, :2].tolist() == pytest.approx(FIRST_VALUES, rel=1e-6)
    assert 0.12 < first.std() < 0.13


def test_seed_changes_every_tensor_and_other_options_change_none():
    plain, other = make_tensors(TinyModel()), make_tensors(TinyModel(seed=1))
    deeper = make_tensors(TinyModel(num_layers=5, tie_embeddings=True))

    for name, tensor in plain.items():
        assert not np.array_equal(tensor, other[name])
        assert name == "lm_head.weight" or np.array_equal(tensor, deeper[name])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_file_is_what_the_reference_reader_expects(tmp_path, dtype):
    import torch
    from safetensors.torch import load_file

    tensors = {"a": np.float32([[1.0, -0.3], [1e-3, 65504.0]]), "b": np.float32([2**-20, 1 + 2**-9])}

    write_safetensors(tmp_path / "x.safetensors", tensors, dtype=dtype)

    found = load_file(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        wanted = torch.tensor(tensor).to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype])
        assert torch.equal(found[name], wanted)


@pytest.mark.parametrize(
    ("kind", "largest_error"),
    [("f16", 3e-4), ("bf16", 3e-3), ("q8_0", 3e-3), ("q6_k", 1.2e-2), ("q5_1", 2e-2), ("q4_k", 4e-2), ("q4_1", 4e-2)],
)
def test_rounded_weights_stay_near_the_drawn_ones(kind, largest_error):
    drawn, rounded = make_tensors(BLOCKS_OF_256), round_through(BLOCKS_OF_256, kind)

    error = max(np.abs(drawn[name] - rounded[name]).max() for name in drawn)

    assert largest_error / 20 < error < largest_error
    norms = [name for name in drawn if "norm" in name]
    assert all(np.array_equal(drawn[name], rounded[name]) for name in norms)


def test_kind_falls_back_where_rows_do_not_divide_into_blocks():
    assert pick_kind(np.zeros((4, 256)), "q4_k") == "q4_k"
    assert pick_kind(np.zeros((4, 96)), "q4_k") == "q8_0"
    assert pick_kind(np.zeros((4, 20)), "q4_k") == "f32"
    assert pick_kind(np.zeros(256), "q4_k") == "f32"


def test_embedding_may_have_a_kind_of_its_own(tmp_path):
    path = write_gguf_model(replace(BLOCKS_OF_256), tmp_path / "m.gguf", kind="q4_1", embed_kind="q8_0")

    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}

    assert (kinds["token_embd.weight"], kinds["blk.0.attn_q.weight"], kinds["output_norm.weight"]) == (
        "Q8_0",
        "Q4_1",
        "F32",
    )


def test_tokenizer_of_the_folder_is_byte_level_and_lossless(tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_hf_model(TinyModel(), tmp_path / "model") / "tokenizer.json"))
    text = "Grüße, the 東京 😀\t<|im_end|>\x00 no  double"

    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert SPECIAL_TOKENS.index("<|im_end|>") in ids
    assert tokenizer.get_vocab_size() == 512
    assert len(tokenizer.encode("the").ids) < 3, "letters merge"
