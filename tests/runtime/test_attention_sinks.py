"""A window with sinks: what each query sees, at which distances, and that nothing else changes a bit.

`defined` below is the definition, written out in float64 without runners, blocks or tiles.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.step import NULL_BLOCK
from octavo.models.program import Attend, RopeStore
from octavo.models.spec import Rope
from octavo.runtime.reference_attention import attend, attention_shapes
from octavo.runtime.reference_ops import rotate
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.runtime.rope_table import RopeTable
from octavo.runtime.row_matmul import choose_row_arithmetic
from octavo.testing.hand_plans import Chunk, make_plan
from octavo.testing.native_probe import INPUT
from octavo.testing.random_weights import make_random_model

SCALE = 0.7
HEAD_DIM = 32
THETA = 10_000.0
SHAPES = [(20, 4), (20, 0), (64, 1), (2, 40), (5, 64), (100, 130), (600, 4), (40, 530)]
"""Window and sinks: within a tile, across tiles of 16 and 64 tokens, across the splits of 512."""


def make_rows(length, *, num_heads=4, num_kv_heads=2, seed=0):
    """Return unrotated queries, keys and values `[length, heads, HEAD_DIM]`."""
    rng = np.random.default_rng([seed, length])
    heads = rng.standard_normal((length, num_heads + 2 * num_kv_heads, HEAD_DIM), dtype=np.float32) / 2
    return np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)


def turned(vectors, positions):
    """Rotate `[length, heads, HEAD_DIM]` as rotary embeddings are defined: pairs (i, i + half) are complex numbers."""
    half = HEAD_DIM // 2
    angles = np.asarray(positions)[:, None] * THETA ** (-np.arange(half) / half)
    pairs = vectors[..., :half].astype(np.float64) + 1j * vectors[..., half:].astype(np.float64)
    result = pairs * np.exp(1j * angles)[:, None]
    return np.concatenate([result.real, result.imag], axis=-1)


def defined(queries, keys, values, *, window, num_sinks):
    """Attention row by row: past `num_sinks + window` sinks are read from where the window last followed them."""
    length, num_heads, _ = queries.shape
    group = num_heads // keys.shape[1]
    at_own = turned(queries, np.arange(length))
    at_sinks = turned(queries, np.full(length, num_sinks + window - 1))
    keys_turned, out = turned(keys, np.arange(length)), np.empty(queries.shape)
    for position in range(length):
        for head in range(num_heads):
            k, v = keys_turned[:, head // group], values[:, head // group].astype(np.float64)
            if position < num_sinks + window:
                seen = np.arange(position + 1)
                scores = k[seen] @ at_own[position, head]
            else:
                recent = np.arange(position - window + 1, position + 1)
                seen = np.concatenate([np.arange(num_sinks), recent])
                scores = np.concatenate([k[:num_sinks] @ at_sinks[position, head], k[recent] @ at_own[position, head]])
            weights = np.exp(scores * SCALE - (scores * SCALE).max())
            out[position, head] = weights @ v[seen] / weights.sum()
    return out


def by_reference(rows, *, window, num_sinks, start=0, stop=None):
    """Attend with the reference; what no query sees is NaN."""
    queries, keys, values = rows
    stop = len(queries) if stop is None else stop
    table = RopeTable(Rope(rotary_dim=HEAD_DIM, theta=THETA))
    positions = np.arange(stop, dtype=np.int32)
    stored = [rotate(keys[:stop], *table.cos_sin(positions)), values[:stop].copy()]
    if start >= num_sinks + window:
        for each in stored:
            each[num_sinks : start - window + 1] = np.nan
    chunk = slice(start, stop)
    at_sinks = np.full(stop - start, num_sinks + window - 1, np.int32)
    return attend(
        rotate(queries[chunk], *table.cos_sin(positions[chunk])),
        *(each.transpose(1, 0, 2) for each in stored),
        start_position=start,
        scale=SCALE,
        window=window,
        num_sinks=num_sinks,
        sink_queries=rotate(queries[chunk], *table.cos_sin(at_sinks)) if num_sinks else None,
        arithmetic=choose_row_arithmetic(attention_shapes(HEAD_DIM)),
    )


class NativeProbe:
    """One native layer that attends over given rows."""

    def __init__(self, rows, *, window, num_sinks, block_size=16, threads=1, isa="auto", kv_cache_dtype="f32"):
        pytest.importorskip("octavo.runtime._native", reason="the native module is not built")
        from octavo.testing.native_probe import probe

        self.length, self.num_heads, self.block_size = len(rows[0]), rows[0].shape[1], block_size
        self.window, self.num_sinks = window, num_sinks
        sink_q = "sink_q" if num_sinks else None
        rope = RopeStore(qkv=INPUT, layer=0, sink_q=sink_q, sink_position=num_sinks + window - 1)
        reading = Attend(qkv=INPUT, out="out", layer=0, scale=SCALE, window=window, num_sinks=num_sinks, sink_q=sink_q)
        width = self.num_heads * HEAD_DIM
        self.runner = probe(
            [rope, reading],
            np.concatenate(rows, axis=1).reshape(self.length, -1),
            buffers={"out": width} | ({sink_q: width} if sink_q else {}),
            windows=(window,),
            sizes={
                "num_heads": self.num_heads,
                "num_kv_heads": rows[1].shape[1],
                "head_dim": HEAD_DIM,
                "rope": Rope(rotary_dim=HEAD_DIM, theta=THETA),
            },
            num_blocks=-(-self.length // block_size),
            block_size=block_size,
            threads=threads,
            isa=isa,
            kv_cache_dtype=kv_cache_dtype,
        )

    def attend(self, chunk):
        """Run all rows in chunks; blocks in the gap are replaced by the null block, as the scheduler does."""
        outputs = []
        for start in range(0, self.length, chunk):
            stop = min(start + chunk, self.length)
            table = list(range(1, -(-stop // self.block_size) + 1))
            for block in range(-(-self.num_sinks // self.block_size), (start - self.window + 1) // self.block_size):
                table[block] = NULL_BLOCK
            written = [table[place // self.block_size] for place in range(start, stop) if place % self.block_size == 0]
            part = Chunk("a", range(start, stop), start=start, tables=[table], sample=None)
            self.runner.execute(make_plan([part], new_blocks=written))
            outputs.append(self.runner.read_buffer("out", stop - start))
        return np.concatenate(outputs).reshape(self.length, self.num_heads, HEAD_DIM)


@pytest.mark.parametrize(("window", "num_sinks"), SHAPES)
def test_reference_attends_as_defined(window, num_sinks):
    rows = make_rows(min(300, window + num_sinks + 90))

    got = by_reference(rows, window=window, num_sinks=num_sinks)

    np.testing.assert_allclose(got, defined(*rows, window=window, num_sinks=num_sinks), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(("window", "num_sinks"), SHAPES)
@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
def test_native_attends_as_defined(window, num_sinks, isa):
    from octavo.runtime import _native

    try:
        _native.isa_name(isa)
    except ValueError as error:
        pytest.skip(str(error))
    rows = make_rows(window + num_sinks + 90)

    got = NativeProbe(rows, window=window, num_sinks=num_sinks, isa=isa, threads=2).attend(130)

    np.testing.assert_allclose(got, defined(*rows, window=window, num_sinks=num_sinks), rtol=3e-5, atol=3e-6)


def test_the_definition_depends_on_sinks_and_on_where_they_are_read_from():
    """Guards the two tests above: neither dropping sinks nor reading them from afar would pass."""
    rows = make_rows(120)
    sinks, none = (defined(*rows, window=20, num_sinks=number) for number in (4, 0))
    far = rows[0].copy()
    assert np.abs(sinks - none)[60:].max() > 0.01

    plain = defined(far, *rows[1:], window=1000, num_sinks=4)
    assert np.abs(sinks - plain)[24:].max() > 0.01
    np.testing.assert_array_equal(sinks[:24], plain[:24])


@pytest.mark.parametrize(("window", "num_sinks"), SHAPES)
def test_reference_has_the_bits_of_full_attention_until_a_gap_opens(window, num_sinks):
    length = min(300, window + num_sinks + 30)
    rows = make_rows(length)

    got = by_reference(rows, window=window, num_sinks=num_sinks)
    full = by_reference(rows, window=10_000, num_sinks=0)

    np.testing.assert_array_equal(got[: window + num_sinks], full[: window + num_sinks])
    assert length <= window + num_sinks or not np.array_equal(got, full)


@pytest.mark.parametrize(("window", "num_sinks"), SHAPES)
@pytest.mark.parametrize("kv_cache_dtype", ["f16", "int8", "int4"])
def test_native_has_the_bits_of_full_attention_until_a_gap_opens(window, num_sinks, kv_cache_dtype):
    rows = make_rows(window + num_sinks + 30)

    got = NativeProbe(rows, window=window, num_sinks=num_sinks, kv_cache_dtype=kv_cache_dtype).attend(64)
    full = NativeProbe(rows, window=10_000, num_sinks=0, kv_cache_dtype=kv_cache_dtype).attend(64)

    np.testing.assert_array_equal(got[: window + num_sinks], full[: window + num_sinks])
    assert not np.array_equal(got, full)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(("window", "num_sinks"), [(20, 4), (5, 64), (70, 33)])
def test_reference_gives_the_same_bits_in_chunks_with_nothing_in_the_gap(window, num_sinks, chunk):
    rows = make_rows(150)
    whole = by_reference(rows, window=window, num_sinks=num_sinks)

    parts = [
        by_reference(rows, window=window, num_sinks=num_sinks, start=start, stop=min(150, start + chunk))
        for start in range(0, 150, chunk)
    ]

    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize(("window", "num_sinks"), [(20, 4), (5, 64), (1100, 4), (600, 530)])
def test_native_bits_do_not_depend_on_chunks_blocks_or_threads(window, num_sinks, kv_cache_dtype):
    """Windows of more than a split are cut between threads, and sinks are then left for whoever merges."""
    rows = make_rows(window + num_sinks + 40)
    asked = {"window": window, "num_sinks": num_sinks, "kv_cache_dtype": kv_cache_dtype}
    whole = NativeProbe(rows, **asked).attend(len(rows[0]))

    for chunk, block_size, threads in [(7, 16, 1), (1, 16, 2), (333, 32, 3), (64, 48, 2), (len(rows[0]), 16, 5)]:
        if chunk == 1 and len(rows[0]) > 200:
            continue
        got = NativeProbe(rows, **asked, block_size=block_size, threads=threads).attend(chunk)
        np.testing.assert_array_equal(got, whole, err_msg=f"chunks {chunk}, blocks {block_size}, threads {threads}")


def test_one_row_is_cut_between_threads_with_its_sinks():
    """A decode against 5 splits: five threads share it, one does not; the row reads sinks in either case."""
    rows = make_rows(2600, num_heads=4, num_kv_heads=1)
    outputs = []
    for threads in (1, 2, 5):
        probe = NativeProbe(rows, window=2400, num_sinks=20, threads=threads, kv_cache_dtype="f16")
        outputs.append(probe.attend(2599)[-1])

    assert all(np.array_equal(each, outputs[0]) for each in outputs)
    full = NativeProbe(rows, window=10_000, num_sinks=0, kv_cache_dtype="f16").attend(2599)[-1]
    assert not np.array_equal(full, outputs[0])


def test_reference_runner_never_reads_blocks_in_the_gap():
    """Their entries are the null block, and its content is NaN."""
    model = make_random_model(window_and_sinks=(20, 5))
    tokens = np.random.default_rng(1).integers(0, 96, 100).tolist()
    outputs = []
    for drops in (False, True):
        runner = ReferenceRunner(model.spec, model.program, model.weights, num_blocks=30, block_size=4, poison=True)
        table = list(range(1, 26))
        for start in range(0, 100, 10):
            if drops:
                for block in range(2, max(2, (start - 19) // 4)):
                    table[block] = NULL_BLOCK
            answer = runner.execute(make_plan([Chunk("a", tokens[start : start + 10], start=start, tables=[table])]))
        assert (table.count(NULL_BLOCK) > 10) == drops
        outputs.append(answer.samples[0])

    assert outputs[0] == outputs[1]
