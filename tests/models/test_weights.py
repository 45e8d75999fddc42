"""Reading weights: equal to what was written, owned, in the right row order, and never mapped."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import ModelFileError
from octavo.models.load import open_model
from octavo.models.names import gguf_name, hf_name
from octavo.models.tensor_kinds import KIND_LAYOUTS
from octavo.models.weights import WeightSource
from octavo.models.weights_decode import decode_f32
from octavo.testing.tiny_gguf import round_through, write_gguf_model
from octavo.testing.tiny_models import TinyModel, encode_float, make_tensors, write_hf_model, write_safetensors

MODEL = TinyModel(num_heads=4, num_kv_heads=2)
WIDE = TinyModel(hidden_size=256, intermediate_size=512, num_kv_heads=2, tie_embeddings=True)


def load(path, progress=None):
    with WeightSource(open_model(path)) as source:
        return {tensor.name: tensor for tensor in source.read_all(progress)}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_safetensors_weights_are_the_bytes_of_the_file(tmp_path, dtype, num_shards):
    loaded = load(write_hf_model(MODEL, tmp_path / "model", dtype=dtype, num_shards=num_shards))

    for name, tensor in loaded.items():
        written = make_tensors(MODEL)[hf_name(name)]
        assert tensor.kind == dtype
        assert tensor.data.tobytes() == encode_float(written, dtype)
        assert tensor.to_f32().shape == written.shape
        assert np.allclose(tensor.to_f32(), written, rtol={"f32": 0, "f16": 2**-11, "bf16": 2**-8}[dtype], atol=1e-7)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q6_k"])
def test_gguf_weights_equal_the_float_weights_they_stand_for(tmp_path, architecture, kind):
    """Rows of q and k come back in Hugging Face order, quantised or not, where the family permutes them."""
    model = TinyModel(
        architecture=architecture,
        hidden_size=256,
        intermediate_size=256,
        num_heads=8,
        num_kv_heads=2,
        vocab_size=300,
        attention_bias=architecture == "llama",
        num_layers=1,
    )
    expected = round_through(model, kind)

    loaded = load(write_gguf_model(model, tmp_path / "tiny.gguf", kind=kind))

    assert {hf_name(name) for name in loaded} == set(expected)
    assert loaded["layers.0.q"].kind == kind
    for name, tensor in loaded.items():
        assert np.array_equal(tensor.to_f32(), expected[hf_name(name)]), name


def test_permuted_rows_really_move(tmp_path):
    """Guards the test above: q and k of a Llama file differ from the model's, other tensors do not."""
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")

    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}

    moved = {
        name: not np.array_equal(stored[gguf_name(name)], make_tensors(MODEL)[hf_name(name)])
        for name in ("layers.0.q", "layers.0.k", "layers.0.v", "layers.0.o")
    }

    assert moved == {"layers.0.q": True, "layers.0.k": True, "layers.0.v": False, "layers.0.o": False}


@pytest.mark.parametrize("kind", KIND_LAYOUTS)
def test_every_kind_decodes_bit_for_bit_as_the_gguf_package_does(kind):
    """Random bytes, so every code and scale occurs; bits are compared, so that NaN and -0 count."""
    layout = KIND_LAYOUTS[kind]
    num_blocks = 3 if layout.block_size > 1 else 96
    rows = np.random.default_rng(11).integers(0, 256, (67, num_blocks * layout.block_bytes), dtype=np.uint8)

    with np.errstate(all="ignore"):
        decoded = decode_f32(rows, kind, num_blocks * layout.block_size)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.upper()])

    assert decoded.dtype == np.float32
    assert np.array_equal(decoded.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def test_decoding_in_pieces_changes_nothing(monkeypatch):
    rows = np.random.default_rng(3).integers(0, 256, (50, 2 * 18), dtype=np.uint8)
    with np.errstate(all="ignore"):
        whole = decode_f32(rows, "q4_0", 64)
        monkeypatch.setattr("octavo.models.weights_decode._CHUNK_VALUES", 64 * 7)
        pieces = decode_f32(rows, "q4_0", 64)

    assert np.array_equal(whole.view(np.uint32), pieces.view(np.uint32))


def test_progress_ends_at_the_total_and_never_goes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.models.weights._CHUNK_BYTES", 10_000)
    path = write_gguf_model(WIDE, tmp_path / "tiny.gguf")
    reports = []

    load(path, lambda done, total: reports.append((done, total)))

    model = open_model(path)
    assert len(reports) > len(model.tensors), "large tensors report more than once"
    assert reports == sorted(reports)
    assert {total for _, total in reports} == {model.weight_bytes}
    assert reports[-1][0] == model.weight_bytes


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_loaded_weights_do_not_depend_on_the_file_any_more(tmp_path, kind):
    if kind == "hf":
        target = write_hf_model(MODEL, tmp_path / "model")
        file = target / "model.safetensors"
    else:
        target = file = write_gguf_model(MODEL, tmp_path / "tiny.gguf", kind="q8_0")
    loaded = load(target)
    before = {name: tensor.data.tobytes() for name, tensor in loaded.items()}

    with file.open("r+b") as handle:
        handle.truncate(100)

    assert str(file) not in Path("/proc/self/maps").read_text()
    assert file not in [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert all(tensor.data.tobytes() == before[name] for name, tensor in loaded.items())
    assert all(owner(tensor.data).flags.owndata for tensor in loaded.values())


def owner(array):
    while array.base is not None:
        array = array.base
    return array


def test_file_that_became_shorter_after_opening_is_an_error_that_names_the_tensor(tmp_path):
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")
    model = open_model(path)
    os.truncate(path, path.stat().st_size - 5000)

    complaint = r"tensor 'output(_norm)?\.weight' is cut off|the file changed"
    with pytest.raises(ModelFileError, match=complaint), WeightSource(model) as source:
        list(source.read_all())


def test_file_that_was_replaced_after_opening_is_an_error(tmp_path):
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")
    model = open_model(path)
    write_gguf_model(TinyModel(num_heads=4, num_kv_heads=2, seed=1), tmp_path / "other.gguf")
    (tmp_path / "other.gguf").replace(path)
    os.utime(path, ns=(1, 1))

    with pytest.raises(ModelFileError, match="the file changed while"), WeightSource(model) as source:
        list(source.read_all())


def test_file_that_is_replaced_during_loading_is_read_to_its_old_end(tmp_path):
    """The open file is the old one; a rename over its name changes nothing."""
    path = write_gguf_model(MODEL, tmp_path / "tiny.gguf")
    write_gguf_model(TinyModel(num_heads=4, num_kv_heads=2, seed=1), tmp_path / "other.gguf")
    expected = load(path)

    with WeightSource(open_model(path)) as source:
        tensors = source.read_all()
        first = next(tensors)
        (tmp_path / "other.gguf").replace(path)
        rest = list(tensors)

    assert [tensor.name for tensor in (first, *rest)] == list(expected)
    assert all(np.array_equal(tensor.data, expected[tensor.name].data) for tensor in (first, *rest))


def test_tied_model_may_store_its_head_as_long_as_it_is_the_embedding(tmp_path):
    tied = TinyModel(tie_embeddings=True)
    folder = write_hf_model(tied, tmp_path / "model")
    tensors = make_tensors(tied)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_safetensors(folder / "model.safetensors", same)

    assert "lm_head" not in load(folder)

    other = same["lm_head.weight"].copy()
    other[-1, -1] += 1
    write_safetensors(folder / "model.safetensors", same | {"lm_head.weight": other})
    with pytest.raises(ModelFileError, match=r"'lm_head\.weight' differs from the embedding"):
        load(folder)


def test_reading_keeps_one_copy(tmp_path):
    """Read one by one and let go, tensors take the memory of the largest, not of all."""
    model = TinyModel(num_layers=24, vocab_size=64, intermediate_size=256)
    path = write_gguf_model(model, tmp_path / "tiny.gguf")
    opened = open_model(path)
    largest = max(entry.num_bytes for entry in opened.tensors.values())
    assert opened.weight_bytes > 20 * largest

    tracemalloc.start()
    with WeightSource(opened) as source:
        for tensor in source.read_all():
            del tensor
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4 * largest + 100_000
