"""Row products: equal bits wherever a row sits, chosen by trying, with a way out where BLAS fails."""

from __future__ import annotations

import numpy as np
import pytest
import threadpoolctl

from octavo.runtime import row_matmul
from octavo.runtime.row_matmul import RowArithmetic, RowMatmul, choose_row_arithmetic, lanes_agree, panel_rows

# (num_outputs, width): whole panels, a last panel of 36 rows, fewer rows than a panel, one row, a long sum.
SHAPES = [(128, 576), (100, 64), (5, 20), (1, 40), (70, 1536), (33, 4096)]
SUMS_WITHOUT_BLAS = RowArithmetic(tile_rows=1, uses_blas=False, reason="asked for by a test")


def make_product(num_outputs, width, arithmetic=None):
    weight = np.random.default_rng(num_outputs).standard_normal((num_outputs, width), dtype=np.float32)
    return weight, RowMatmul(weight, arithmetic or choose_row_arithmetic([(panel_rows(width), width)]))


def make_rows(num_rows, width, seed=7):
    return np.random.default_rng(seed).standard_normal((num_rows, width), dtype=np.float32)


@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
@pytest.mark.parametrize("arithmetic", [None, SUMS_WITHOUT_BLAS], ids=["chosen", "without-blas"])
def test_a_row_has_the_same_bits_alone_and_in_any_company(num_outputs, width, arithmetic):
    _, product = make_product(num_outputs, width, arithmetic)
    rows = make_rows(70, width)
    alone = np.concatenate([product(rows[i : i + 1]) for i in range(70)])

    for first, last in [(0, 70), (0, 2), (1, 8), (3, 11), (5, 21), (40, 70), (69, 70)]:
        assert np.array_equal(product(rows[first:last]), alone[first:last]), (first, last)


@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
@pytest.mark.parametrize("arithmetic", [None, SUMS_WITHOUT_BLAS], ids=["chosen", "without-blas"])
def test_a_product_is_the_product(num_outputs, width, arithmetic):
    weight, product = make_product(num_outputs, width, arithmetic)
    rows = make_rows(11, width)

    exact = rows.astype(np.float64) @ weight.astype(np.float64).T
    # Rounding errors of a float32 sum of n terms stay well below n units in the last place of the sum of magnitudes.
    bound = np.abs(rows.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T * width * 2.0**-24
    assert np.all(np.abs(product(rows) - exact) <= bound)
    assert product(rows).shape == (11, num_outputs)


def test_one_and_two_blas_threads_give_the_same_bits():
    _, product = make_product(512, 1536)
    rows = make_rows(64, 1536)

    with threadpoolctl.threadpool_limits(1):
        one = product(rows)
    with threadpoolctl.threadpool_limits(2):
        two = product(rows)

    assert np.array_equal(one, two)


@pytest.mark.parametrize("width", [1, 64, 576, 1536, 2048, 4096, 8191])
def test_a_product_is_too_small_for_blas_to_wake_a_second_thread(width):
    """OpenBLAS starts a second thread from 2 x 2^18 multiplications on."""
    assert 8 <= panel_rows(width) <= 64
    assert panel_rows(width) * width * 8 < 2**19


def test_a_row_of_nan_stays_alone():
    _, product = make_product(100, 64)
    rows = make_rows(9, 64)
    clean = product(rows)
    rows[4] = np.nan

    dirty = product(rows)

    assert np.isnan(dirty[4]).all()
    assert np.array_equal(np.delete(dirty, 4, axis=0), np.delete(clean, 4, axis=0))


def test_no_rows_give_no_rows():
    _, product = make_product(100, 64)

    assert product(make_rows(0, 64)).shape == (0, 100)


def test_eight_row_tiles_are_chosen_here_with_a_reason():
    """Every x86 kernel of OpenBLAS tried so far agrees in eight lanes; a machine where this fails is worth knowing."""
    arithmetic = choose_row_arithmetic([(64, 576), (32, 1536), (64, 64)])

    assert (arithmetic.tile_rows, arithmetic.uses_blas) == (8, True)
    assert "all 3 shapes" in arithmetic.reason


def crooked_matmul(*, from_lane, real=np.matmul):
    """A BLAS that sums backwards in the lanes from `from_lane` on, as the AVX2 kernel of OpenBLAS does from 6 on."""

    def matmul(weights, tiles):
        product = real(weights, tiles)
        backwards = real(np.ascontiguousarray(weights[..., ::-1]), np.ascontiguousarray(tiles[..., ::-1, :]))
        product[..., from_lane:] = backwards[..., from_lane:]
        return product

    return matmul


def test_lanes_that_sum_in_another_order_are_noticed(monkeypatch):
    monkeypatch.setattr(row_matmul.np, "matmul", crooked_matmul(from_lane=6))

    assert not lanes_agree((64, 576), 8)
    assert lanes_agree((64, 576), 4)


def test_a_lower_tile_is_chosen_where_eight_lanes_differ(monkeypatch):
    monkeypatch.setattr(row_matmul.np, "matmul", crooked_matmul(from_lane=6))

    arithmetic = choose_row_arithmetic([(64, 576), (64, 64)])

    assert (arithmetic.tile_rows, arithmetic.uses_blas) == (4, True)
    assert "differ in tiles of 8 rows at panel x width 64 x 64" in arithmetic.reason


def test_sums_without_blas_are_chosen_where_no_tile_passes(monkeypatch):
    monkeypatch.setattr(row_matmul, "lanes_agree", lambda shape, tile_rows: False)

    arithmetic = choose_row_arithmetic([(64, 576)])

    assert (arithmetic.tile_rows, arithmetic.uses_blas) == (1, False)
    assert arithmetic.reason.startswith("sums without BLAS; lanes differ in tiles of 8 rows")
