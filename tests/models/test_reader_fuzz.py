"""Damaged files: every one is either refused with our own error or still a model; none crashes or eats memory."""

from __future__ import annotations

import resource

import pytest

from octavo.errors import OctavoError
from octavo.models.load import open_model
from octavo.models.weights import WeightSource
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import LLAMA3_ROPE, TinyModel, write_hf_model

STRIDE = 97
# Small, so that the table and the metadata are most of the file.
MODEL = TinyModel(
    num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, vocab_size=40, head_dim=8
)
MAX_GROWTH_BYTES = 256 * 2**20


def outcome(path):
    """Return "model" or the error's class; anything but our own errors propagates and fails the test."""
    try:
        with WeightSource(open_model(path)) as source:
            for tensor in source.read_all():
                assert tensor.data.size == len(tensor.data.tobytes())
    except OctavoError as error:
        assert str(error)
        return type(error).__name__
    return "model"


@pytest.fixture(params=["hf", "gguf", "gguf with a vocabulary"])
def files(request, tmp_path):
    """Return what is opened, and the file that is damaged."""
    if request.param == "hf":
        folder = write_hf_model(MODEL, tmp_path / "model", dtype="bf16")
        return folder, folder / "model.safetensors"
    vocab_size = 40 if request.param == "gguf" else 270
    model = TinyModel(
        num_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=vocab_size,
        head_dim=8,
        rope_scaling=LLAMA3_ROPE,
    )
    path = write_gguf_model(model, tmp_path / "tiny.gguf", kind="q8_0")
    return path, path


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_cut_file_is_always_refused(files):
    target, damaged = files
    content = damaged.read_bytes()
    before = peak_bytes()

    for length in range(0, len(content), STRIDE):
        damaged.write_bytes(content[:length])
        assert outcome(target) in ("ModelFileError", "UnsupportedModelError"), length

    damaged.write_bytes(content)
    assert outcome(target) == "model"
    assert peak_bytes() - before < MAX_GROWTH_BYTES


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_flipped_bit_gives_a_model_or_a_refusal(files, bit):
    target, damaged = files
    content = damaged.read_bytes()
    before = peak_bytes()
    outcomes = set()

    for place in range(bit, len(content), STRIDE):
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        damaged.write_bytes(flipped)
        outcomes.add(outcome(target))

    assert "model" in outcomes, "some flips only change a weight"
    assert len(outcomes) > 1, "some flips are noticed"
    assert peak_bytes() - before < MAX_GROWTH_BYTES


def test_every_bit_of_the_front_of_a_file_may_flip(files):
    """Lengths, counts and types lie there: the values that lead readers astray."""
    target, damaged = files
    content = damaged.read_bytes()
    before = peak_bytes()

    for place in range(min(400, len(content))):
        flipped = bytearray(content)
        flipped[place] ^= 0x80 if place % 2 else 0x01
        damaged.write_bytes(flipped)
        outcome(target)

    assert peak_bytes() - before < MAX_GROWTH_BYTES


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_damaged_configuration_gives_a_model_or_a_refusal(tmp_path, name):
    folder = write_hf_model(TinyModel(num_layers=1), tmp_path / "model")
    content = (folder / name).read_bytes()

    for place in range(len(content)):
        for damaged in (content[:place], content[:place] + bytes([content[place] ^ 0x11]) + content[place + 1 :]):
            (folder / name).write_bytes(damaged)
            try:
                open_model(folder)
            except OctavoError as error:
                assert str(error)
