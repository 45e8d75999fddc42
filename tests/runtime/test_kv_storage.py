"""KV storage: slots, rounding, copies, poison, any block size."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.step import BlockCopy
from octavo.runtime.kv_codes import decode, encode
from octavo.runtime.kv_storage import KVStorage
from octavo.testing.random_weights import make_random_model


def make_storage(*, num_blocks=9, block_size=4, dtype="f32", poison=False, windows=(None, None)):
    spec = make_random_model(windows=windows).spec
    return KVStorage(spec, num_blocks=num_blocks, block_size=block_size, dtype=dtype, poison=poison)


def make_kv(num_tokens, seed=0):
    return np.random.default_rng(seed).standard_normal((2, num_tokens, 2, 8), dtype=np.float32)


def write_all(storage, layer, block_ids, keys, values):
    positions = np.arange(len(keys), dtype=np.int32)
    blocks = np.asarray(block_ids, np.int32)[positions // storage.block_size]
    storage.write(layer, blocks, positions % np.int32(storage.block_size), keys, values)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40])
def test_what_is_written_through_a_table_is_read_through_it(block_size, num_tokens):
    storage = make_storage(num_blocks=50, block_size=block_size)
    table = np.random.default_rng(num_tokens).permutation(np.arange(1, 51))[: -(-num_tokens // block_size)]
    keys, values = make_kv(num_tokens)
    write_all(storage, 1, table, keys, values)

    read_keys, read_values = storage.read_kv(1, table.tolist(), num_tokens)
    gathered_keys, gathered_values = storage.gather(1, table.astype(np.int32), num_tokens)

    assert np.array_equal(read_keys, keys) and np.array_equal(read_values, values)
    assert np.array_equal(gathered_keys, keys.transpose(1, 0, 2))
    assert np.array_equal(gathered_values, values.transpose(1, 0, 2))


def test_layers_of_a_group_do_not_touch_each_other():
    storage = make_storage()
    first, second = make_kv(8, seed=1), make_kv(8, seed=2)
    write_all(storage, 0, [3, 1], *first)
    write_all(storage, 1, [3, 1], *second)

    assert np.array_equal(storage.read_kv(0, [3, 1], 8), first)
    assert np.array_equal(storage.read_kv(1, [3, 1], 8), second)


def test_a_copy_carries_all_layers_of_a_block():
    storage = make_storage(poison=True)
    for layer in (0, 1):
        write_all(storage, layer, [2], *make_kv(4, seed=layer))

    storage.copy([BlockCopy(source=2, destination=7), BlockCopy(source=2, destination=5)])

    for layer in (0, 1):
        for block in (2, 7, 5):
            assert np.array_equal(storage.read_kv(layer, [block], 4), make_kv(4, seed=layer))


def test_writing_to_the_copy_leaves_the_source_alone():
    storage = make_storage()
    write_all(storage, 0, [2], *make_kv(4, seed=1))
    storage.copy([BlockCopy(source=2, destination=7)])
    write_all(storage, 0, [7], *make_kv(2, seed=3))

    assert np.array_equal(storage.read_kv(0, [2], 4), make_kv(4, seed=1))
    assert np.array_equal(storage.read_kv(0, [7], 2), make_kv(2, seed=3))


def test_a_group_block_has_the_size_of_the_largest_group():
    """Five layers in groups of 2, 1 and 2 share one pool: the smaller group's records are padded."""
    storage = make_storage(windows=(None, None, None, 16, 16), block_size=4, num_blocks=9)

    assert storage.num_bytes == 10 * 2 * 2 * 2 * 4 * 8 * 4  # blocks, layers, K and V, heads, places, width, bytes


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_poison_is_nan_in_every_dtype(dtype):
    storage = make_storage(dtype=dtype, poison=True)
    assert all(np.isnan(part).all() for part in storage.gather(0, np.array([0, 4], np.int32), 8))

    write_all(storage, 0, [4, 5], *make_kv(8))
    storage.poison([5])

    keys, _ = storage.gather(0, np.array([4, 5], np.int32), 8)
    assert np.isfinite(keys[:, :4]).all() and np.isnan(keys[:, 4:]).all()


@pytest.mark.parametrize(
    "copies",
    [[BlockCopy(source=1, destination=2), BlockCopy(source=2, destination=3)], [BlockCopy(source=1, destination=0)]],
    ids=["chain", "null block"],
)
def test_copies_that_no_scheduler_may_ask_for_are_refused(copies):
    with pytest.raises(AssertionError):
        make_storage().copy(copies)


# --- rounding ---------------------------------------------------------------------------------------------------------


def round_to_bf16(value):
    """Nearest of the two neighbouring bf16 numbers, ties to the even one, in exact arithmetic on doubles."""
    bits = int(np.float32(value).view(np.uint32))
    low = float(np.uint32(bits & 0xFFFF0000).view(np.float32))
    high = float(np.uint32((bits & 0xFFFF0000) + 0x10000).view(np.float32))
    below, above = abs(float(value) - low), abs(high - float(value))
    is_low_even = (bits >> 16) % 2 == 0
    return low if below < above or (below == above and is_low_even) else high


def test_bf16_rounds_to_nearest_even():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(2000) * 10.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
    ties = np.array([1.00390625, 1.01171875, -1.00390625, -1.01171875], np.float32)  # 1 + 1/256, 1 + 3/256
    values = np.concatenate([values, ties])

    assert decode(encode(values, "bf16"), "bf16").tolist() == [round_to_bf16(value) for value in values]


def test_bf16_keeps_infinities_nans_and_signed_zero():
    nan_with_low_payload = np.uint32(0x7F800001).view(np.float32)  # truncation would make it infinity
    nan_of_ones = np.uint32(0xFFFFFFFF).view(np.float32)  # the carry would make it zero
    values = np.array([np.inf, -np.inf, 0.0, -0.0, np.nan, nan_with_low_payload, nan_of_ones], np.float32)

    stored = decode(encode(values, "bf16"), "bf16")

    assert stored[:4].tolist() == [np.inf, -np.inf, 0.0, 0.0]
    assert np.signbit(stored[:4]).tolist() == [False, True, False, True]
    assert np.isnan(stored[4:]).all()


def test_bf16_overflows_to_infinity_only_beyond_its_range():
    largest = np.uint32(0x7F7F0000).view(np.float32)
    beyond = np.uint32(0x7F7F8000).view(np.float32)

    assert decode(encode(np.array([largest, beyond]), "bf16"), "bf16").tolist() == [largest, np.inf]


def test_f16_rounds_to_nearest_even_and_overflows_to_infinity():
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65504, 65519, 65520, -1e6, 2**-25, 3 * 2**-25], np.float32)

    stored = decode(encode(values, "f16"), "f16")

    assert stored.tolist() == [1.0, 1 + 2**-9, 65504, 65504, np.inf, -np.inf, 0.0, 2**-23]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_stored_numbers_are_read_back_exactly_and_stored_again_alike(dtype):
    storage = make_storage(dtype=dtype)
    keys, values = make_kv(8)
    write_all(storage, 0, [3, 1], keys, values)
    once = storage.read_kv(0, [3, 1], 8)

    write_all(storage, 0, [2, 4], *(decode(part, dtype) for part in once))

    assert all(np.array_equal(a, b) for a, b in zip(storage.read_kv(0, [2, 4], 8), once, strict=True))
    assert np.array_equal(decode(once[0], dtype), keys) == (dtype == "f32")
