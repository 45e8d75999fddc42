"""Weights held in another kind than stored: rounded to nearest, refused where they cannot be held."""

import numpy as np
import pytest

from octavo.errors import ModelFileError
from octavo.models.tensor_kinds import row_bytes
from octavo.models.weights import Tensor
from octavo.models.weights_decode import decode_f32

native = pytest.importorskip("octavo.runtime._native", reason="the native module is not built")
held_rows = pytest.importorskip("octavo.runtime.held_rows")


def tensor(values, kind="f32"):
    data = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    return Tensor(name="layers.0.q", shape=values.shape, kind=kind, data=data)


def held(values, kind):
    rows = held_rows.hold(tensor(values), kind)
    assert rows.shape == (len(values), row_bytes(kind, values.shape[1], tensor="w"))
    return decode_f32(rows, kind, values.shape[1])


@pytest.fixture
def values():
    return np.random.default_rng(7).standard_normal((37, 96)).astype(np.float32)


def test_the_stored_kind_is_kept_without_a_copy(values):
    stored = tensor(values)

    assert held_rows.hold(stored, "f32") is stored.data


def test_float_kinds_round_to_nearest(values):
    torch = pytest.importorskip("torch")

    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        expected = torch.from_numpy(values).to(dtype).float().numpy()
        np.testing.assert_array_equal(held(values, kind), expected)


def test_ties_round_to_even_in_bf16():
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]], np.float32)

    np.testing.assert_array_equal(held(values, "bf16"), [[1, 1 + 2**-6, -1]])


def test_eight_bits_are_off_by_half_a_step_at_most(values):
    greatest = np.abs(values.reshape(37, 3, 32)).max(axis=-1, keepdims=True)

    error = np.abs(held(values, "q8_0") - values).reshape(37, 3, 32)

    # The scale is a half float, 2^-11 off at most, which moves the largest number by 127 * 2^-11 steps.
    assert (error <= greatest / 127 * (0.5 + 127 / 2**11)).all()


def test_four_bits_beat_the_plain_range_of_the_block(values):
    """Least squares never makes a block worse than scale and minimum from its extremes, and the sum clearly better."""
    blocks = values.reshape(-1, 32).astype(np.float64)
    least = blocks.min(axis=1, keepdims=True).astype(np.float16).astype(np.float64)
    step = ((blocks.max(axis=1, keepdims=True) - blocks.min(axis=1, keepdims=True)) / 15).astype(np.float16)
    plain = np.clip(np.rint((blocks - least) / step), 0, 15) * step.astype(np.float64) + least
    plain_error = ((plain - blocks) ** 2).sum(axis=1)

    error = ((held(values, "q4_1").reshape(-1, 32) - blocks) ** 2).sum(axis=1)

    assert (error <= plain_error * 1.001).all()
    assert error.sum() < 0.95 * plain_error.sum()


def test_constant_and_zero_blocks_are_exact():
    values = np.repeat(np.array([[0.0], [1.5], [-0.25]], np.float32), 64, axis=1)

    np.testing.assert_array_equal(held(values, "q4_1"), values)
    np.testing.assert_array_equal(held(values[:1], "q8_0"), values[:1])


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -3e38])
def test_a_value_that_cannot_be_held_is_an_error(values, kind, bad):
    values[5, 40] = bad

    with pytest.raises(ModelFileError, match=rf"layers\.0\.q.*{kind}"):
        held_rows.hold(tensor(values), kind)


def test_large_tensors_are_converted_in_pieces(values, monkeypatch):
    whole = held(values, "q4_1")
    monkeypatch.setattr(held_rows, "_CHUNK_VALUES", 500)  # five rows at a time

    np.testing.assert_array_equal(held(values, "q4_1"), whole)


def test_a_stored_kind_without_kernels_is_decoded_first(values):
    import gguf

    rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q5_0)
    stored = Tensor(name="layers.0.q", shape=values.shape, kind="q5_0", data=rows)

    eight = decode_f32(held_rows.hold(stored, "q8_0"), "q8_0", 96)

    decoded = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q5_0)
    assert np.abs(eight - decoded).max() <= np.abs(decoded).max() / 127 * 0.6
