"""Row-wise ops: what they compute, and that a row's bits do not depend on where it lies in an array."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from octavo.models.spec import Rope
from octavo.runtime.reference_ops import activate, embed, rms_norm, rotate
from octavo.runtime.rope_table import RopeTable


def make_rows(num_rows, width, seed=0, scale=3.0):
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32) * np.float32(scale)


def rotate_all(rows):
    cos, sin = RopeTable(Rope(rotary_dim=8)).cos_sin(np.arange(len(rows), dtype=np.int32))
    return rotate(rows.reshape(len(rows), -1, 8), cos, sin).reshape(rows.shape)


WIDTHS = [8, 16, 24, 40, 64, 72, 128, 136, 576, 1536]
OPS = {
    "rms_norm": lambda rows: rms_norm(rows, np.linspace(0.5, 2, rows.shape[1], dtype=np.float32), 1e-5),
    "head_rms_norm": lambda rows: rms_norm(rows.reshape(len(rows), -1, 8), np.ones(8, np.float32), 1e-6).reshape(
        rows.shape
    ),
    "gated_silu": lambda x: activate(x, "silu", has_gate=True, num_parts=1),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(op, width):
    """Sums run pairwise over the row alone, and exp is the same in the body and the tail of an array."""
    rows = make_rows(70, width, seed=width)
    together = op(rows)

    for first, last in [(0, 1), (1, 2), (69, 70), (0, 7), (3, 8), (5, 70), (11, 44)]:
        assert np.array_equal(op(rows[first:last].copy()), together[first:last]), (first, last)
    wider = np.concatenate([rows, rows], axis=1)  # a slice of a wider buffer, as the norms of q and k see it
    assert np.array_equal(op(wider[:, :width]), together)


def test_exp_does_not_depend_on_the_place_in_an_array():
    values = make_rows(1, 500, scale=8.0)[0]
    together = np.exp(values)

    for length in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65):
        for first in range(40):
            assert np.array_equal(np.exp(values[first : first + length]), together[first : first + length])


def test_embedding_scales_rows_of_the_table():
    table = make_rows(5, 4)

    assert np.array_equal(embed(np.array([3, 0, 3], np.int32), table, 2.0), table[[3, 0, 3]] * 2)
    assert embed(np.array([1], np.int32), table, 1.5).dtype == np.float32


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_the_norm(width):
    rows, weight = make_rows(5, width), make_rows(1, width, seed=9)[0]
    exact = rows.astype(np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-5) * weight

    np.testing.assert_allclose(rms_norm(rows, weight, 1e-5), exact, rtol=1e-6)


def test_rms_norm_of_nothing_stays_nothing():
    assert not rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), 1e-5).any()


def test_silu_gates_and_has_its_limits_without_warnings():
    gate = np.array([[0.0, 1.0, -1.0, 200.0, -200.0, -1e4]], np.float32)
    up = np.full_like(gate, 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = activate(np.concatenate([gate, up], axis=1), "silu", has_gate=True, num_parts=1)[0]

    exact = [2 * x / (1 + math.exp(min(-x, 700))) for x in gate[0].tolist()]
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-30)


def test_rotation_pairs_a_dimension_with_the_one_half_a_width_away():
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    cos, sin = np.array([[0.6, 0.0]], np.float32), np.array([[0.8, 1.0]], np.float32)

    rotated = rotate(x, cos, sin)[0, 0]

    assert rotated == pytest.approx([1 * 0.6 - 3 * 0.8, -4, 3 * 0.6 + 1 * 0.8, 2, 5, 6])  # the last two stay


def test_rotation_multiplies_and_adds_with_a_rounding_each():
    """What every runner must do: no fused multiply-add."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3, 8)).astype(np.float32)
    cos, sin = (rng.standard_normal((50, 4)).astype(np.float32) for _ in range(2))

    rotated = rotate(x, cos, sin)

    for t, h, i in [(0, 0, 0), (7, 2, 3), (49, 1, 1)]:
        product, other = x[t, h, i] * cos[t, i], x[t, h, i + 4] * sin[t, i]
        assert rotated[t, h, i] == np.float32(product - other)


def test_rope_angles_are_doubles_rounded_once():
    table = RopeTable(Rope(rotary_dim=8, theta=10_000.0))
    positions = np.array([0, 1, 5000, 8191, 3], np.int32)

    cos, sin = table.cos_sin(positions)

    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            assert cos[row, pair] == np.float32(math.cos(angle))
            assert sin[row, pair] == np.float32(math.sin(angle))


def test_rope_angles_do_not_depend_on_how_the_table_grew():
    rope = Rope(rotary_dim=16, kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.139)
    positions = np.arange(300, dtype=np.int32)
    at_once = RopeTable(rope).cos_sin(positions)
    table = RopeTable(rope)

    one_by_one = [table.cos_sin(positions[i : i + 1]) for i in range(300)]

    assert np.array_equal(np.concatenate([cos for cos, _ in one_by_one]), at_once[0])
    assert np.array_equal(np.concatenate([sin for _, sin in one_by_one]), at_once[1])
    assert at_once[0][0, 0] == np.float32(1.139)


def test_no_rotation_leaves_q_and_k_as_they_are():
    rows = make_rows(5, 16)
    cos, sin = RopeTable(Rope(rotary_dim=16, kind="none")).cos_sin(np.arange(5, dtype=np.int32))

    assert np.array_equal(rotate(rows[:, None], cos, sin)[:, 0], rows)
