"""Codes and scales of keys and values: against plain definitions, and what becomes of rows that are not ordinary."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.models.kv_record import row_code_bytes
from octavo.runtime.hadamard import hadamard, hadamard_block, hadamard_inverse
from octavo.runtime.kv_codes import decode, dequantise, levels, quantise

DTYPES = ["int8", "fp8_e4m3", "int4"]


def rows_of(num_rows=500, head_dim=64, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_rows, head_dim)) * 10.0 ** rng.integers(-30, 30, (num_rows, 1))
    return rows.astype(np.float32)


def all_levels(dtype):
    """Every level there is, from every code."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype == "fp8_e4m3":
        return levels(codes[(codes & 0x7F) != 0x7F], dtype)  # e4m3 has two NaNs
    return levels(codes.view(np.int8) if dtype == "int8" else codes, dtype)


def e4m3_number(code):
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def test_levels_are_what_the_codes_say():
    assert levels(np.arange(-127, 128, dtype=np.int8), "int8").tolist() == list(range(-127, 128))
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    numbers = levels(np.array(codes, np.uint8), "fp8_e4m3") * 256
    assert numbers.tolist() == [e4m3_number(code) for code in codes]
    # The lower half of a byte is the number before; halves are two's complement.
    assert levels(np.array([0x71, 0x8F], np.uint8), "int4").tolist() == [16, 112, -16, -128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_number_becomes_the_nearest_level(dtype):
    rows = rows_of()
    codes, scales = quantise(rows, dtype)

    numbers = decode(scales, "bf16").astype(np.float64)[:, None]
    stored = levels(codes, dtype).astype(np.float64) * numbers
    nearest = np.abs(rows[..., None] - all_levels(dtype).astype(np.float64) * numbers[..., None]).min(axis=-1)
    error = np.abs(rows - stored)
    assert codes.shape == (len(rows), row_code_bytes(dtype, 64))
    assert np.all(error <= nearest * (1 + 1e-6) + np.abs(rows) * 2.0**-23)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_even_code(dtype):
    extreme = {"int8": 127.0, "fp8_e4m3": 448.0, "int4": -8.0}[dtype]
    row = np.array([[extreme, 2.5, 3.5, -2.5, -3.5, 0.5, -0.5, 1.5]], np.float32)

    codes, scales = quantise(row, dtype)

    scale = {"int8": 1.0, "fp8_e4m3": 256.0, "int4": 1 / 16}[dtype]
    assert decode(scales, "bf16").tolist() == [scale]
    if dtype == "fp8_e4m3":
        assert dequantise(codes, scales, dtype).tolist() == row.tolist()  # all of these are e4m3 numbers
        wide = np.array([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10, -3 * 2.0**-10, 15.5 / 1024]], np.float32)
        again = dequantise(*quantise(wide, dtype), dtype)
        assert again.tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8, -(2.0**-8), 2.0**-6]]
    else:
        assert dequantise(codes, scales, dtype).tolist() == [[extreme, 2, 4, -2, -4, 0, 0, 2]]


def test_e4m3_rounds_as_another_implementation_does():
    torch = pytest.importorskip("torch")
    rows = rows_of(seed=3)
    rows[:, ::5] *= np.float32(1e-4)  # subnormal e4m3 numbers

    codes, scales = quantise(rows, "fp8_e4m3")

    quotients = torch.from_numpy(rows / decode(scales, "bf16")[:, None] * np.float32(256))
    assert (np.abs(quotients.numpy()) < 2**-6).any()
    assert np.array_equal(codes, quotients.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_rounded_away_from_zero_so_that_no_number_is_outside_the_levels(dtype):
    rows = rows_of(seed=1)
    _, scales = quantise(rows, dtype)

    top = {"int8": 127, "fp8_e4m3": 1.75, "int4": 128}[dtype]
    reach = np.abs(decode(scales, "bf16").astype(np.float64)) * top
    largest = np.abs(rows).max(axis=1)
    assert np.all(reach >= largest * (1 - 2.0**-23)) and np.all(reach <= largest * (1 + 2.0**-7))


def test_int4_gives_the_longer_side_of_a_row_the_level_more():
    codes, scales = quantise(np.array([[8.0, -7.0], [-8.0, 7.0], [8.0, -8.0]], np.float32), "int4")

    assert decode(scales, "bf16").tolist() == [-1 / 16, 1 / 16, -1 / 16]
    assert levels(codes, "int4").tolist() == [[-128, 112], [-128, 112], [-128, 112]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_has_scale_zero(dtype):
    rows = np.zeros((2, 8), np.float32)
    rows[1] = -0.0
    codes, scales = quantise(rows, dtype)

    assert scales.tolist() == [0, 0] and not codes.any()
    assert not dequantise(codes, scales, dtype).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_is_lost_as_a_whole_and_no_other_row_changes(dtype, bad):
    rows = rows_of(5)
    clean = quantise(rows, dtype)
    rows[2, 7] = bad
    codes, scales = quantise(rows, dtype)

    assert np.isnan(dequantise(codes, scales, dtype)[2]).all()
    assert scales[2] == 0x7FC0 and not codes[2].any(), "one spelling, so that runners can be compared"
    others = [0, 1, 3, 4]
    assert np.array_equal(codes[others], clean[0][others]) and np.array_equal(scales[others], clean[1][others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e30, 3e38])
def test_rows_of_any_finite_size_stay_finite(dtype, size):
    row = np.array([[size, -size / 2, 0, size / 4, 0, 0, 0, 0]], np.float32)
    again = dequantise(*quantise(row, dtype), dtype)

    assert np.isfinite(again).all()
    assert np.abs(again - row).max() <= max(0.1 * size, 128 * 1.2e-38)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_outlier_takes_the_small_numbers_of_its_own_row_only(dtype):
    rows = np.ones((3, 8), np.float32)
    rows[1, 0] = 1e20
    again = dequantise(*quantise(rows, dtype), dtype)

    assert np.abs(again[1, 1:]).max() == 0 and again[1, 0] == pytest.approx(1e20, rel=0.01)
    np.testing.assert_allclose(again[[0, 2]], 1, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_depends_on_the_row_alone(dtype):
    rows = rows_of(6).reshape(2, 3, 64)
    codes, scales = quantise(rows, dtype)

    for index in np.ndindex(2, 3):
        alone = quantise(rows[index][None], dtype)
        assert np.array_equal(alone[0][0], codes[index]) and alone[1][0] == scales[index]


# --- the transform ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "block"), [(64, 64), (128, 128), (96, 32), (80, 16), (100, 4), (36, 4), (6, 2), (7, 1)]
)
def test_the_transform_is_a_hadamard_matrix_per_block(head_dim, block):
    assert hadamard_block(head_dim) == block
    matrix = hadamard(np.eye(head_dim, dtype=np.float32))

    places = np.arange(head_dim)
    signs = np.array([[(-1) ** (i % block & j % block).bit_count() for j in places.tolist()] for i in places.tolist()])
    assert np.array_equal(matrix, signs * (places[:, None] // block == places // block))


def test_the_transform_and_its_inverse_undo_each_other_exactly_on_whole_numbers():
    x = np.random.default_rng(0).integers(-50, 50, (4, 3, 96)).astype(np.float32)

    assert np.array_equal(hadamard_inverse(hadamard(x)), x)
    assert np.array_equal((hadamard_inverse(x) * hadamard(x)).sum(axis=-1), (x * x).sum(axis=-1))


def test_the_transform_keeps_four_bits_from_being_spent_on_an_outlier():
    rows = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
    rows[:, 5] *= 30

    plain = dequantise(*quantise(rows, "int4"), "int4")
    spread = hadamard_inverse(dequantise(*quantise(hadamard(rows), "int4"), "int4"))

    assert np.square(spread - rows).mean() < np.square(plain - rows).mean() / 2
