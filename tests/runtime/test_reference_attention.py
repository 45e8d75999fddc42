"""Attention of one request: what it computes, and that a row's bits depend on its own tokens alone."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.runtime import reference_attention
from octavo.runtime.reference_attention import TILE_TOKENS, attend, attention_shapes
from octavo.runtime.row_matmul import RowArithmetic, choose_row_arithmetic

SUMS_WITHOUT_BLAS = RowArithmetic(tile_rows=1, uses_blas=False, reason="asked for by a test")
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]


def make_case(num_tokens, *, num_heads=6, num_kv_heads=2, head_dim=16, seed=0):
    rng = np.random.default_rng([seed, num_tokens])
    queries = rng.standard_normal((num_tokens, num_heads, head_dim), dtype=np.float32)
    keys, values = rng.standard_normal((2, num_kv_heads, num_tokens, head_dim), dtype=np.float32)
    return queries, keys, values


def run(queries, keys, values, *, start=0, window=None, arithmetic=None):
    return attend(
        queries,
        keys,
        values,
        start_position=start,
        scale=0.25,
        window=window,
        arithmetic=arithmetic or choose_row_arithmetic(attention_shapes(queries.shape[2])),
    )


def exact(queries, keys, values, *, window=None):
    """Softmax attention in float64, row by row."""
    out = np.empty(queries.shape)
    group = queries.shape[1] // len(keys)
    for position in range(len(queries)):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            k, v = (x[head // group, first : position + 1].astype(np.float64) for x in (keys, values))
            scores = k @ queries[position, head].astype(np.float64) * 0.25
            weights = np.exp(scores - scores.max())
            out[position, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 16, 70])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (3, 3), (8, 1)])
def test_attention_is_softmax_over_the_visible_keys(num_tokens, window, num_heads, num_kv_heads):
    case = make_case(num_tokens, num_heads=num_heads, num_kv_heads=num_kv_heads)

    np.testing.assert_allclose(run(*case, window=window), exact(*case, window=window), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("head_dim", [8, 20, 64, 96, 128, 256])
def test_attention_takes_any_head_width(head_dim):
    case = make_case(70, head_dim=head_dim)

    np.testing.assert_allclose(run(*case), exact(*case), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 64, 70])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 65])
@pytest.mark.parametrize("arithmetic", [None, SUMS_WITHOUT_BLAS], ids=["chosen", "without-blas"])
def test_chunks_give_the_bits_of_the_whole(window, chunk, arithmetic):
    num_tokens = 150
    queries, keys, values = make_case(num_tokens)
    whole = run(queries, keys, values, window=window, arithmetic=arithmetic)

    parts = [
        run(
            queries[start : start + chunk],
            keys[:, : start + chunk],
            values[:, : start + chunk],
            start=start,
            window=window,
            arithmetic=arithmetic,
        )
        for start in range(0, num_tokens, chunk)
    ]

    assert np.array_equal(np.concatenate(parts), whole)


def test_working_in_turns_changes_no_bit(monkeypatch):
    case = make_case(200)
    at_once = run(*case)
    monkeypatch.setattr(reference_attention, "_MAX_SCORES", 1)  # one query tile at a time

    assert np.array_equal(run(*case), at_once)


def test_heads_are_independent():
    queries, keys, values = make_case(90)
    both = run(queries, keys, values)

    assert np.array_equal(run(queries[:, 3:], keys[1:], values[1:]), both[:, 3:])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_lies_before_every_window_cannot_get_in(garbage):
    """Blocks that fell out of the window are handed to others; the null block takes their place in the table."""
    queries, keys, values = make_case(150)
    last, window = 140, 30
    clean = run(queries[last:], keys, values, start=last, window=window)
    for stored in (keys, values):
        stored[:, : last - window + 1] = garbage

    assert np.array_equal(run(queries[last:], keys, values, start=last, window=window), clean)


def test_what_another_row_of_the_chunk_no_longer_sees_does_not_change_its_bits():
    """The first row of the chunk sees keys that have left the window of the last: masked, not multiplied by zero."""
    queries, keys, values = make_case(100)
    alone = run(queries[99:], keys, values, start=99, window=10)
    keys[:, 80] = 1e30

    assert np.array_equal(run(queries[90:], keys, values, start=90, window=10)[9:], alone)


def test_later_tokens_of_a_chunk_do_not_show_in_earlier_rows():
    queries, keys, values = make_case(3 * TILE_TOKENS)
    whole = run(queries, keys, values)
    keys[:, 100:], values[:, 100:] = 7.0, -3.0

    changed = run(queries, keys, values)

    assert np.array_equal(changed[:100], whole[:100])
    assert not np.array_equal(changed[100:], whole[100:])
