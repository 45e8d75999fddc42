"""Paged attention equals dense attention, and its bits depend on a row's own query, keys and values alone."""

import numpy as np
import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.models.program import Attend, RopeStore
from octavo.runtime.hadamard import hadamard, hadamard_inverse
from octavo.runtime.kv_codes import dequantise, quantise
from octavo.testing.hand_plans import Chunk, make_plan
from octavo.testing.native_probe import INPUT, probe

SPLIT = 512
KV_DTYPES = ("f32", "f16", "bf16", "int8", "fp8_e4m3", "int4")
ISAS = ("portable", "avx2", "auto")


class Case:
    """One sequence of random queries, keys and values, and runners that attend over it."""

    def __init__(self, rng, *, length, num_heads=6, num_kv_heads=2, head_dim=32, window=None, spread=2.0):
        self.length, self.window = length, window
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.table = (rng.standard_normal((length, width)) * spread / head_dim**0.25).astype(np.float32)
        self.scale = 0.7

    def runner(self, *, kv_cache_dtype="f32", block_size=16, num_blocks=None, threads=1, isa="auto", rows=None):
        blocks_needed = -(-self.length // block_size)
        return probe(
            [
                RopeStore(qkv=INPUT, layer=0),
                Attend(qkv=INPUT, out="out", layer=0, scale=self.scale, window=self.window),
            ],
            self.table,
            buffers={"out": self.num_heads * self.head_dim},
            windows=(self.window,),
            sizes={"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim},
            num_blocks=num_blocks or blocks_needed,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
            isa=isa,
            max_num_batched_tokens=rows or self.length,
        )

    def attend(self, runner, chunks, *, block_size=16, block_ids=None):
        """Run the sequence in chunks of these sizes; return the outputs of all rows."""
        block_ids = block_ids or range(1, -(-self.length // block_size) + 1)
        outputs, start = [], 0
        for size in chunks:
            new = sorted({block_ids[p // block_size] for p in range(start, start + size) if p % block_size == 0})
            chunk = Chunk("a", range(start, start + size), start=start, tables=[block_ids], sample=None)
            runner.execute(make_plan([chunk], new_blocks=new))
            outputs.append(runner.read_buffer("out", size))
            start += size
        assert start == self.length
        return np.concatenate(outputs)

    def dense(self, kv_cache_dtype="f32"):
        """The same in float64 without blocks."""
        heads = self.table.astype(np.float64).reshape(self.length, -1, self.head_dim)
        q, k, v = np.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=1)
        k, v = (rounded(each, kv_cache_dtype).repeat(self.num_heads // self.num_kv_heads, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * self.scale
        query, key = np.ogrid[: self.length, : self.length]
        visible = (key <= query) & (key > query - (self.window or self.length))
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(self.length, -1)


def rounded(values, kv_cache_dtype):
    single = values.astype(np.float32)
    if kv_cache_dtype == "f16":
        return single.astype(np.float16).astype(np.float64)
    if kv_cache_dtype == "int4":
        return hadamard_inverse(dequantise(*quantise(hadamard(single), "int4"), "int4")).astype(np.float64)
    if kv_cache_dtype in ("int8", "fp8_e4m3"):
        return dequantise(*quantise(single, kv_cache_dtype), kv_cache_dtype).astype(np.float64)
    if kv_cache_dtype == "bf16":
        bits = single.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)
    return values


def chunks_of(length, size):
    return [size] * (length // size) + ([length % size] if length % size else [])


def skip_unless_usable(isa):
    from octavo.runtime import _native

    try:
        _native.isa_name(isa)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 70])
def test_attention_equals_dense_around_tile_boundaries(rng, length, kv_cache_dtype, isa):
    skip_unless_usable(isa)
    case = Case(rng, length=length)

    got = case.attend(case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa), [length])

    np.testing.assert_allclose(got, case.dense(kv_cache_dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 17])
def test_attention_equals_dense_around_split_boundaries(rng, length, isa):
    skip_unless_usable(isa)
    case = Case(rng, length=length, num_heads=3, num_kv_heads=1)

    got = case.attend(case.runner(kv_cache_dtype="f16", isa=isa, threads=2), [length])

    np.testing.assert_allclose(got, case.dense("f16"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 100, 128, 192, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (5, 5), (9, 3), (8, 2), (8, 1), (7, 1), (13, 1)])
def test_attention_equals_dense_for_every_shape_of_heads(rng, num_heads, num_kv_heads, head_dim, isa):
    skip_unless_usable(isa)
    kv_cache_dtype = str(rng.choice(KV_DTYPES[1:]))  # all of them in a few runs
    print(kv_cache_dtype)
    length = int(rng.integers(20, 60))
    case = Case(rng, length=length, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    got = case.attend(case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa), chunks_of(length, 23))

    np.testing.assert_allclose(got, case.dense(kv_cache_dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [1, 5, 16, 33, 600])
def test_window_hides_everything_before_it(rng, window):
    case = Case(rng, length=700, num_heads=4, num_kv_heads=2, window=window)

    got = case.attend(case.runner(kv_cache_dtype="f32", threads=2), chunks_of(700, 130))

    np.testing.assert_allclose(got, case.dense(), rtol=2e-5, atol=2e-5)


def test_steep_scores_are_rescaled_exactly_enough(rng):
    """Scores that rise by hundreds from tile to tile force a rescale at nearly every one."""
    case = Case(rng, length=300, spread=1.0)
    keys = slice(case.num_heads * case.head_dim, (case.num_heads + case.num_kv_heads) * case.head_dim)
    case.table[:, keys] *= np.linspace(1, 60, 300, dtype=np.float32)[:, None]

    got = case.attend(case.runner(), [300])

    np.testing.assert_allclose(got, case.dense(), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_bits_do_not_depend_on_chunks_blocks_or_threads(rng, kv_cache_dtype, isa):
    skip_unless_usable(isa)
    length = 2 * SPLIT + 37
    case = Case(rng, length=length, num_heads=9, num_kv_heads=3, head_dim=64)
    whole = case.attend(case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa), [length])

    for chunk in (1, 7, 16, 64):
        if chunk == 1 and isa == "portable":
            continue  # slow, and 7 takes the same paths
        got = case.attend(case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa, rows=chunk), chunks_of(length, chunk))
        assert np.array_equal(whole, got), f"chunks of {chunk}"
    for threads in (2, 3):
        runner = case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa, threads=threads)
        assert np.array_equal(whole, case.attend(runner, chunks_of(length, 333))), f"{threads} threads"
    for block_size in (32, 48):
        runner = case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa, block_size=block_size)
        assert np.array_equal(whole, case.attend(runner, [length], block_size=block_size)), f"blocks of {block_size}"
    shuffled = list(rng.permutation(np.arange(1, 200)))
    runner = case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa, num_blocks=200)
    assert np.array_equal(whole, case.attend(runner, [length], block_ids=[int(each) for each in shuffled]))


def test_bits_of_a_long_decode_do_not_depend_on_how_its_splits_are_shared_out(rng):
    """One row against six splits: two and five threads cut it into items, one thread does not."""
    length = 6 * SPLIT - 3
    case = Case(rng, length=length, num_heads=4, num_kv_heads=1)
    outputs = []
    for threads in (1, 2, 5):
        runner = case.runner(kv_cache_dtype="f16", threads=threads, rows=length)
        case.attend(runner, [length - 1, 1])
        outputs.append(runner.read_buffer("out", 1))

    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_batch(rng, threads):
    """Twenty sequences at different places in one step, against each alone."""
    case = Case(rng, length=640, num_heads=6, num_kv_heads=2)
    num_blocks = 20 * 40
    ends = [int(end) for end in rng.integers(1, 640, 20)]
    sizes = [int(rng.integers(1, min(end, 9) + 1)) for end in ends]
    tables = [list(range(1 + 40 * i, 41 + 40 * i)) for i in range(20)]
    batched = case.runner(kv_cache_dtype="bf16", num_blocks=num_blocks, threads=threads, rows=1280)

    alone = []
    for end, size, table in zip(ends, sizes, tables, strict=True):
        for runner in (batched, single := case.runner(kv_cache_dtype="bf16", num_blocks=num_blocks)):
            if end > size:
                first = Chunk("a", range(end - size), tables=[table], sample=None)
                runner.execute(make_plan([first], new_blocks=table))
        single.execute(make_plan([Chunk("a", range(end - size, end), start=end - size, tables=[table], sample=None)]))
        alone.append(single.read_buffer("out", size))
    chunks = [
        Chunk(f"r{i}", range(end - size, end), start=end - size, tables=[table], sample=None)
        for i, (end, size, table) in enumerate(zip(ends, sizes, tables, strict=True))
    ]
    batched.execute(make_plan(chunks))

    together = batched.read_buffer("out", sum(sizes))
    assert np.array_equal(np.concatenate(alone), together)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("threads", [1, 2])
def test_requests_that_hold_the_same_blocks_visit_them_together_with_the_same_bits(rng, isa, block_size, threads):
    """A tree: 24 requests share a split, two halves of them share another each, and the tails are their own."""
    skip_unless_usable(isa)
    shared, branch, tail = 512, 512, 40
    length = shared + 2 * branch + 24 * tail
    case = Case(rng, length=length, num_heads=6, num_kv_heads=2)
    runner = case.runner(
        kv_cache_dtype="f16", block_size=block_size, threads=threads, isa=isa, num_blocks=400, rows=2048
    )
    free = [int(each) for each in rng.permutation(np.arange(1, 401))]
    trunk_blocks = [free.pop() for _ in range(shared // block_size)]  # with 48, a split ends inside the next block
    requests = []
    for half in range(2):
        # Tokens before the tail, and blocks of all but the last ones that the tail touches.
        start = shared + half * branch
        before = [*range(shared), *range(start, start + branch)]
        branch_blocks = trunk_blocks + [free.pop() for _ in range(len(before) // block_size - len(trunk_blocks))]
        for number in range(12):
            first = shared + 2 * branch + (12 * half + number) * tail
            size = int(rng.integers(1, tail + 1))
            tokens = before + list(range(first, first + size))
            needed = -(-len(tokens) // block_size)
            requests.append((tokens, branch_blocks + [free.pop() for _ in range(needed - len(branch_blocks))]))

    def fill(tokens, table):
        chunk = Chunk("a", tokens[:-1], tables=[table], sample=None)
        runner.execute(make_plan([chunk]))

    def last(which):
        chunks = [
            Chunk(f"r{i}", requests[i][0][-1:], start=len(requests[i][0]) - 1, tables=[requests[i][1]], sample=None)
            for i in which
        ]
        runner.execute(make_plan(chunks))
        return runner.read_buffer("out", len(chunks))

    for tokens, table in requests:
        fill(tokens, table)
    alone = [last([i]) for i in range(24)]
    assert runner.num_shared_items == 0
    order = [int(each) for each in rng.permutation(24)]
    together = last(order)

    assert runner.num_shared_items >= (3 if block_size == 16 else 1) * case.num_kv_heads
    assert np.array_equal(np.concatenate([alone[i] for i in order]), together)


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_garbage_behind_the_context_stays_out(rng, kv_cache_dtype):
    """NaN and infinity in the unwritten rest of a block, and in later tokens of the same step, change no bit."""
    case = Case(rng, length=21)
    clean = case.attend(case.runner(kv_cache_dtype=kv_cache_dtype), [21])
    dirty = Case(rng, length=40)
    dirty.table[:21] = case.table
    dirty.table[21:] = np.inf
    dirty.table[30:] = np.nan

    got = dirty.attend(dirty.runner(kv_cache_dtype=kv_cache_dtype), [40])

    assert np.isnan(got[39]).any(), "the garbage was attended to by its own rows"
    assert np.array_equal(clean, got[:21])


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (16, 1, 128), (2, 2, 88), (5, 1, 36)])
def test_a_wider_instruction_set_changes_no_bit(rng, num_heads, num_kv_heads, head_dim, kv_cache_dtype):
    """`auto` may use AVX-512 where it is; `avx2` never does. On a machine without, both are the same kernels."""
    skip_unless_usable("avx2")
    case = Case(rng, length=600, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    outputs = [
        case.attend(case.runner(kv_cache_dtype=kv_cache_dtype, isa=isa), chunks_of(600, 87)) for isa in ("avx2", "auto")
    ]

    assert np.array_equal(*outputs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_key_or_value_harms_only_those_who_see_that_token_in_that_head(rng, bad, kv_cache_dtype, isa):
    """Rows before it keep their bits, and so do all rows of the other KV head, in the same tile and block."""
    skip_unless_usable(isa)
    length, at = 40, 21
    clean = Case(rng, length=length)
    options = {"kv_cache_dtype": kv_cache_dtype, "isa": isa}
    wanted = clean.attend(clean.runner(**options), [length])
    first_key = clean.num_heads * clean.head_dim
    first_value = first_key + clean.num_kv_heads * clean.head_dim
    half = wanted.shape[1] // 2  # columns of the query heads that read KV head 0

    for column in (first_key + 3, first_value + 7):
        sick = Case(rng, length=length)
        sick.table[:] = clean.table
        sick.table[at, column] = bad
        got = sick.attend(sick.runner(**options), [length])

        assert np.array_equal(got[:at], wanted[:at])
        assert np.array_equal(got[:, half:], wanted[:, half:])
        assert np.isnan(got[at:, :half]).all()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
def test_a_huge_outlier_or_a_row_of_zeros_changes_no_other_token(rng, kv_cache_dtype):
    """A query that does not look at the strange token reads from the others what it always read."""
    length, at = 40, 21
    plain, strange = (Case(rng, length=length, num_heads=1, num_kv_heads=1) for _ in range(2))
    head_dim = plain.head_dim
    plain.table[:, head_dim - 1] = 0  # no query looks along the last dimension
    plain.table[at] = 0
    strange.table[:] = plain.table
    strange.table[at, head_dim : 2 * head_dim] = 1e30 * (np.arange(head_dim) == head_dim - 1)
    runners = [case.runner(kv_cache_dtype=kv_cache_dtype) for case in (plain, strange)]

    wanted, got = (case.attend(runner, [length]) for case, runner in zip((plain, strange), runners, strict=True))

    stored = [runner.read_kv(0, [1, 2, 3], length) for runner in runners]
    others = np.arange(length) != at
    assert all(np.array_equal(a[others], b[others]) for a, b in zip(*stored, strict=True))
    assert [int(part[at].max()) for part in stored[0][2:]] == [0, 0], "zeros have scale 0"
    assert np.array_equal(got[:at], wanted[:at])
    assert np.isfinite(wanted).all()
    if kv_cache_dtype != "int4":  # there the transform spreads the outlier, and its sums cancel only about
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
