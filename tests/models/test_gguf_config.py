"""GGUF metadata: what is read, what is refused, what is an error; and that both formats give the same spec."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.gguf_config import spec_from_gguf
from octavo.models.gguf_file import read_gguf_header
from octavo.models.load import open_model
from octavo.models.rope import inverse_frequencies
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, TinyModel, write_hf_model

MODELS = {
    "llama": TinyModel(),
    "tied": TinyModel(tie_embeddings=True, rope_theta=1e5),
    "biases": TinyModel(attention_bias=True, mlp_bias=True),
    "linear": TinyModel(rope_scaling=LINEAR_ROPE),
    "yarn": TinyModel(rope_scaling=YARN_ROPE),
    "qwen2": TinyModel(architecture="qwen2", norm_eps=1e-6),
    "qwen3": TinyModel(architecture="qwen3", head_dim=32),
    "one kv head": TinyModel(num_kv_heads=1),
}


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    return read_gguf_header(write_gguf_model(TinyModel(), tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def changed(header, **fields):
    """Return the header with fields changed; `__` stands for a dot, `None` removes."""
    metadata = dict(header.metadata)
    for name, value in fields.items():
        metadata.pop(name.replace("__", "."), None)
        if value is not None:
            metadata[name.replace("__", ".")] = value
    return replace(header, metadata=metadata)


@pytest.mark.parametrize("name", MODELS)
def test_both_formats_of_a_model_give_the_same_spec_and_program(tmp_path, name):
    folder = open_model(write_hf_model(MODELS[name], tmp_path / "hf"))
    file = open_model(write_gguf_model(MODELS[name], tmp_path / "tiny.gguf"))

    assert replace(file.spec, name="", bos_token_id=0) == replace(folder.spec, name="", bos_token_id=0)
    assert file.program == folder.program
    assert file.tensors.keys() == folder.tensors.keys()


def test_mistral_is_a_llama_file_and_its_window_is_kept(tmp_path):
    path = write_gguf_model(TinyModel(architecture="mistral", sliding_window=64), tmp_path / "tiny.gguf")

    spec = open_model(path).spec

    assert (spec.architecture, spec.sliding_window, spec.kv_groups[0].window) == ("llama", 64, 64)


def test_llama3_scaling_arrives_as_divisors_and_gives_the_same_frequencies(tmp_path):
    model = TinyModel(rope_scaling=LLAMA3_ROPE)

    file = open_model(write_gguf_model(model, tmp_path / "tiny.gguf")).spec.rope
    folder = open_model(write_hf_model(model, tmp_path / "hf")).spec.rope

    assert len(file.freq_factors) == 8
    assert any(1.0 < factor < 8.0 for factor in file.freq_factors), "some frequency is blended"
    assert inverse_frequencies(file) == pytest.approx(inverse_frequencies(folder), rel=1e-6)


def test_vocabulary_size_may_come_from_the_tokens_or_the_embedding(header):
    assert spec_from_gguf(changed(header, llama__vocab_size=None)).vocab_size == 512
    assert spec_from_gguf(changed(header, llama__vocab_size=None, tokenizer__ggml__tokens=None)).vocab_size == 512


def test_head_width_may_be_left_out(header):
    assert spec_from_gguf(changed(header, llama__attention__key_length=None)).head_dim == 16


def test_sizes_listed_per_layer_are_read_when_all_are_equal(header):
    spec = spec_from_gguf(changed(header, llama__attention__head_count_kv=array("i", [2, 2])))

    assert spec.num_kv_heads == 2


def test_all_ends_of_a_turn_are_ends_of_sequence(header):
    assert spec_from_gguf(changed(header, tokenizer__ggml__eot_token_id=7)).eos_token_ids == (2, 7)


def test_factor_without_a_kind_means_linear_scaling(header):
    for name in ("llama__rope__scaling__factor", "llama__rope__scale_linear"):
        rope = spec_from_gguf(changed(header, **{name: 4.0})).rope
        assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general__architecture": "gemma"}, "general.architecture is 'gemma'"),
        ({"llama__attention__causal": False}, "llama.attention.causal is False"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale is 0.5"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length is 8"),
        ({"llama__attention__head_count": array("i", [4, 2])}, "layers of different sizes"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"llama__rope__scaling__attn_factor": 1.2}, "attn_factor is 1.2"),
    ],
)
def test_what_is_not_implemented_is_refused_by_field_and_value(header, fields, message):
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_gguf(changed(header, **fields))

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general__architecture": None}, "general.architecture is missing"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 0}, "llama.block_count is 0"),
        ({"llama__block_count": 2**31 - 1}, "2,147,483,647 layers"),
        ({"llama__context_length": "long"}, "llama.context_length is 'long'"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama__attention__head_count_kv": array("i", [2])}, "lists 1 sizes"),
        ({"llama__attention__head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"llama__rope__freq_base": float("inf")}, "llama.rope.freq_base is inf"),
        ({"tokenizer__ggml__eos_token_id": 512}, "tokenizer.ggml.eos_token_id names token 512"),
        ({"general__architecture": "qwen2", "llama__x": 1}, "qwen2.block_count is missing"),
    ],
)
def test_odd_value_is_an_error_that_names_the_field(header, fields, message):
    with pytest.raises(ModelFileError) as caught:
        spec_from_gguf(changed(header, **fields))

    assert message in str(caught.value)


def renamed(path: Path, old: str, new: str) -> Path:
    """Rename a tensor or field in place; both names have the same length."""
    assert len(old) == len(new)
    content = path.read_bytes()
    assert content.count(old.encode()) == 1
    path.write_bytes(content.replace(old.encode(), new.encode()))
    return path


def test_qwen2_file_without_its_biases_is_incomplete(tmp_path):
    path = write_gguf_model(TinyModel(architecture="qwen2"), tmp_path / "tiny.gguf")

    with pytest.raises(ModelFileError, match=r"tensor 'blk\.0\.attn_q\.bias' is missing"):
        open_model(renamed(path, "blk.0.attn_q.bias", "blk.9.attn_q.bias"))


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), float("inf")])
def test_divisor_that_is_no_positive_number_is_an_error(tmp_path, divisor):
    path = write_gguf_model(TinyModel(rope_scaling=LLAMA3_ROPE), tmp_path / "tiny.gguf")
    entry = read_gguf_header(path).tensors["rope_freqs.weight"]
    content = bytearray(path.read_bytes())
    content[entry.offset_bytes + 4 : entry.offset_bytes + 8] = struct.pack("<f", divisor)
    path.write_bytes(content)

    with pytest.raises(ModelFileError, match=r"'rope_freqs\.weight' holds a divisor"):
        open_model(path)


def test_epsilon_of_both_formats_is_the_same_number(header):
    """The file holds the float32 9.999999747378752e-06; the spec says 1e-05, as config.json does."""
    stored = header.metadata["llama.attention.layer_norm_rms_epsilon"]

    assert stored == float(np.float32(1e-5)) != 1e-5
    assert spec_from_gguf(header).norm_eps == 1e-5
