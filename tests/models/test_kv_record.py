"""Bytes of keys and values by dtype, and where layers lie in a block record."""

from __future__ import annotations

import pytest

from octavo.models.kv_groups import make_kv_groups
from octavo.models.kv_record import kv_record, layer_dtypes, row_bytes
from octavo.testing.random_weights import make_random_model


def spec_of(windows):
    return make_random_model(windows=windows).spec  # 2 KV heads of 8


@pytest.mark.parametrize(
    ("dtype", "expected"), [("f32", 256), ("f16", 128), ("bf16", 128), ("int8", 66), ("fp8_e4m3", 66), ("int4", 34)]
)
def test_a_row_of_64_numbers(dtype, expected):
    assert row_bytes(dtype, 64) == expected


def test_quantised_rows_of_64_make_a_pool_hold_nearly_twice_and_four_times_the_tokens():
    int8, int4 = (row_bytes("f16", 64) / row_bytes(dtype, 64) for dtype in ("int8", "int4"))

    assert int8 == pytest.approx(1.94, abs=0.005) and int4 == pytest.approx(3.76, abs=0.005)


def test_layers_lie_one_after_the_other():
    record = kv_record(spec_of((None, None, None)), dtype="int8", block_size=4)

    layer_bytes = 2 * 2 * 4 * (8 + 2)  # K and V, heads, places, codes and scale
    assert record.layer_offsets == (0, layer_bytes, 2 * layer_bytes)
    assert record.block_bytes == 3 * layer_bytes


def test_skipped_layers_are_longer_and_shift_what_follows():
    record = kv_record(spec_of((None, None, None)), dtype="int4", block_size=4, skip_layers=(1,))

    quantised, skipped = 2 * 2 * 4 * (4 + 2), 2 * 2 * 4 * 16
    assert record.dtypes == ("int4", "f16", "int4")
    assert record.layer_offsets == (0, quantised, quantised + skipped)
    assert record.block_bytes == 2 * quantised + skipped


def test_records_of_all_groups_are_as_long_as_the_longest():
    """Two groups of two layers; the second has both of the skipped ones."""
    windows = (None, None, 16, 16)
    record = kv_record(spec_of(windows), dtype="int8", block_size=4, skip_layers=(2, 3))

    assert [group.layers for group in make_kv_groups(windows)] == [(0, 1), (2, 3)]
    skipped = 2 * 2 * 4 * 16
    assert record.layer_offsets == (0, 160, 0, skipped)
    assert record.block_bytes == 2 * skipped


def test_without_skipped_layers_all_are_alike():
    assert layer_dtypes(3, "int8") == ("int8",) * 3
    assert layer_dtypes(3, "f16") == ("f16",) * 3
