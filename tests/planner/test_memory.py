"""Bytes of KV cache, blocks and weights, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_cache import GroupSpec
from octavo.models.attention_window import with_attention_window
from octavo.models.kv_record import row_bytes
from octavo.models.spec import KVGroup, ModelSpec, Rope
from octavo.models.tensor_entry import FileStamp, TensorEntry
from octavo.planner.kv_format import kv_format
from octavo.planner.memory import KVShape, kv_shape, max_selected_rows, weight_bytes
from octavo.planner.pool import pool_bytes, usable_blocks

KIB = 1024


def spec(*, layers: int, kv_heads: int, head_dim: int, **changes) -> ModelSpec:
    sizes = ModelSpec(
        name="test",
        architecture="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=layers,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=8192,
        norm_eps=1e-5,
        rope=Rope(),
        tie_embeddings=True,
    )
    return replace(sizes, **changes)


@pytest.mark.parametrize(
    ("sizes", "token_kib"),
    [
        pytest.param({"layers": 32, "kv_heads": 8, "head_dim": 128}, 128, id="llama-3-8b"),
        pytest.param({"layers": 80, "kv_heads": 8, "head_dim": 128}, 320, id="llama-3-70b"),
        pytest.param({"layers": 96, "kv_heads": 96, "head_dim": 128}, 4.5 * 1024, id="gpt-3-175b"),
        pytest.param({"layers": 30, "kv_heads": 3, "head_dim": 64}, 22.5, id="smollm2-135m"),
    ],
)
def test_token_of_a_known_model_takes_its_published_bytes(sizes, token_kib):
    shape = kv_shape(spec(**sizes), kv_dtype="f16", block_size=16)

    assert shape.token_bytes == token_kib * KIB
    assert shape.block_bytes == 16 * token_kib * KIB


def test_f32_takes_twice_the_bytes_of_16_bit():
    sizes = spec(layers=2, kv_heads=2, head_dim=16)

    f32, f16, bf16 = (kv_shape(sizes, kv_dtype=dtype, block_size=16).block_bytes for dtype in ("f32", "f16", "bf16"))

    assert f32 == 2 * f16 == 2 * bf16


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_forecasts_for_any_engine_count_our_own_rows_alike(dtype, head_dim):
    assert kv_format("octavo", dtype).head_bytes(head_dim) == row_bytes(dtype, head_dim)


def test_a_pool_of_equal_bytes_holds_nearly_twice_and_four_times_the_tokens():
    """SmolLM2-135M: heads of 64, so scales take 1/33 and 1/17 of a row."""
    sizes = spec(layers=30, kv_heads=3, head_dim=64)
    f16, int8, int4 = (kv_shape(sizes, kv_dtype=dtype, block_size=16).token_bytes for dtype in ("f16", "int8", "int4"))

    assert (f16, int8, int4) == (23_040, 11_880, 6_120)
    assert f16 / int8 >= 1.85 and f16 / int4 >= 3.5


def test_layers_left_in_16_bit_are_counted():
    sizes = spec(layers=4, kv_heads=2, head_dim=16)
    shape = kv_shape(sizes, kv_dtype="int8", block_size=16, skip_layers=(0, 3))

    assert shape.token_bytes == 2 * (2 * 2 * 18) + 2 * (2 * 2 * 32)
    assert shape.block_bytes == 16 * shape.token_bytes


def test_groups_of_unequal_length_are_padded_to_the_longest():
    """5 full layers and 3 windowed ones: each group's block has room for 5 layers, and a token needs one of each."""
    groups = (KVGroup(layers=(0, 1, 2, 3, 4)), KVGroup(layers=(5, 6, 7), window=1024))
    shape = kv_shape(spec(layers=8, kv_heads=2, head_dim=16, kv_groups=groups), kv_dtype="f16", block_size=16)

    assert shape.block_bytes == 5 * 16 * (2 * 2 * 16 * 2)
    assert shape.token_bytes == 2 * 5 * (2 * 2 * 16 * 2)


def test_windowed_group_never_holds_more_than_window_and_step():
    """Window 1,024 and steps of 1,024 tokens: ceil(2,047 / 16) + 1 = 129 blocks however long the request."""
    shape = KVShape(layers_per_group=1, windows=(1024,), block_size=16, token_layer_bytes=4)

    assert shape.blocks_for_tokens(100_000, max_num_batched_tokens=1024) == 129
    assert shape.blocks_for_tokens(33, max_num_batched_tokens=1024) == 3


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 300)), min_size=1, max_size=3),
    block_size=st.integers(1, 40),
    num_blocks=st.integers(0, 200),
    batched=st.integers(1, 100),
    limit=st.integers(1, 3000),
)
def test_longest_request_fits_and_one_token_more_does_not(windows, block_size, num_blocks, batched, limit):
    shape = KVShape(layers_per_group=1, windows=tuple(windows), block_size=block_size, token_layer_bytes=4)

    longest = shape.longest_tokens(num_blocks, max_num_batched_tokens=batched, limit=limit)

    assert shape.blocks_for_tokens(longest, max_num_batched_tokens=batched) <= num_blocks
    if longest < limit:
        assert shape.blocks_for_tokens(longest + 1, max_num_batched_tokens=batched) > num_blocks


@given(
    window=st.integers(2, 300),
    num_sinks=st.integers(0, 100),
    block_size=st.integers(1, 40),
    batched=st.integers(1, 100),
    num_tokens=st.integers(1, 3000),
)
def test_window_and_sinks_take_the_blocks_that_the_scheduler_promises(
    window, num_sinks, block_size, batched, num_tokens
):
    whole = spec(layers=2, kv_heads=2, head_dim=16, kv_groups=(KVGroup(layers=(0, 1)),))
    windowed = with_attention_window(whole, window=window, num_sinks=num_sinks)
    shape = kv_shape(windowed, kv_dtype="f16", block_size=block_size)

    group = GroupSpec(window=window, num_sinks=num_sinks)
    assert shape.blocks_for_tokens(num_tokens, max_num_batched_tokens=batched) == group.num_blocks(
        num_tokens, block_size, batched
    )
    assert shape.without_windows().blocks_for_tokens(num_tokens, max_num_batched_tokens=batched) == -(
        -num_tokens // block_size
    )


@given(num_blocks=st.integers(1, 10**6), block_bytes=st.integers(1, 10**7))
def test_pool_holds_a_null_block_beside_the_usable_ones(num_blocks, block_bytes):
    total = pool_bytes(num_blocks, block_bytes)

    assert total == (num_blocks + 1) * block_bytes
    assert usable_blocks(total, block_bytes) == num_blocks
    assert usable_blocks(total - 1, block_bytes) == num_blocks - 1


def test_pool_too_small_for_the_null_block_has_no_usable_block():
    assert usable_blocks(0, 100) == 0
    assert usable_blocks(199, 100) == 0
    assert usable_blocks(200, 100) == 1


def test_weights_are_counted_as_they_are_held():
    entries = {
        name: tensor(name, shape, kind)
        for name, shape, kind in [
            ("layers.0.attention_norm", (72,), "f32"),
            ("layers.0.q", (64, 64), "q4_1"),
            ("layers.0.q_bias", (72,), "f32"),
            ("embed", (10, 64), "q8_0"),
        ]
    }

    stored = weight_bytes(entries, lambda entry: entry.kind)
    as_f32 = weight_bytes(entries, lambda _: "f32")

    # Rows lie in panels of 16, and so do biases: 10 rows take 16, and 72 numbers 80.
    assert stored == 72 * 4 + 64 * 64 // 32 * 20 + 80 * 4 + 16 * 64 // 32 * 34
    assert as_f32 == 4 * (72 + 64 * 64 + 80 + 16 * 64)


def test_logit_rows_cover_running_requests_or_a_tile_of_scored_tokens():
    assert max_selected_rows(max_num_batched_tokens=512, max_num_seqs=8) == 64
    assert max_selected_rows(max_num_batched_tokens=512, max_num_seqs=100) == 100
    assert max_selected_rows(max_num_batched_tokens=16, max_num_seqs=8) == 16


def tensor(name: str, shape: tuple[int, ...], kind: str) -> TensorEntry:
    stamp = FileStamp(size_bytes=0, modified_ns=0)
    return TensorEntry(name=name, shape=shape, kind=kind, path=Path("x"), offset_bytes=0, num_bytes=0, stamp=stamp)
