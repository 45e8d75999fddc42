"""Products of the native kernels equal the stated arithmetic bit for bit, for every weight kind and instruction set."""

from pathlib import Path

import numpy as np
import pytest

from octavo.models.tensor_kinds import KIND_LAYOUTS, row_bytes
from octavo.runtime.reference_linear import FLOAT_KINDS, linear, quantise_rows
from octavo.testing.weight_rows import HELD_KINDS, random_rows

native = pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

BLOCK_KINDS = tuple(kind for kind in HELD_KINDS if kind not in FLOAT_KINDS)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def kernels(request):
    """Name of the kernels under test; those for AVX-512 stand in for AVX2 by themselves, as their bits are the same."""
    try:
        packed = pack(np.zeros((1, 4), np.uint8), "f32", 1, request.param)
    except ValueError as error:
        pytest.skip(str(error))
    if packed.kernels != request.param:
        pytest.skip("this machine has no AVX-512 with VNNI, or its kernels did not pass their test at load")
    return request.param


def pack_parts(parts, num_inputs, kernels):
    isa = "portable" if kernels == "portable" else "avx2"
    return native.pack_linear(parts, num_inputs, isa, may_widen=kernels == "avx512")


def pack(rows, kind, num_inputs, kernels):
    return pack_parts([(kind, rows.reshape(-1), len(rows), None)], num_inputs, kernels)


def stated(x, rows, kind, kernels):
    return linear(x, rows, kind, is_fused=kernels != "portable")


def widths(kind):
    """Input widths around the pieces that kernels cut them into (256 inputs of float kinds, 24 groups of others)."""
    if kind in FLOAT_KINDS:
        return (1, 2, 33, 255, 257, 576, 769)
    block = KIND_LAYOUTS[kind].block_size
    return (32, 64, 576, 736, 768, 800, 1536, 1568) if block == 32 else (256, 512, 768, 1024, 1536)


def activations(rng, num_rows, num_inputs):
    """Rows of very different size, with zeros, a huge outlier, and groups that are all zero, tiny or equal."""
    x = rng.standard_normal((num_rows, num_inputs), dtype=np.float32)
    x *= rng.lognormal(0, 4, (num_rows, 1)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = 0
    x[rng.integers(num_rows), rng.integers(num_inputs)] = 3e6
    for value in (0.0, 1e-38, 1e-20, -7.25):
        x[rng.integers(num_rows), : min(num_inputs, 32)] = value
    return x


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_products_equal_the_stated_arithmetic_to_the_bit(kind, kernels, rng):
    for num_inputs in widths(kind):
        for num_outputs in rng.permutation([1, 2, 15, 16, 17, 31, 33, 100])[:3].tolist():
            rows, _ = random_rows(rng, kind, num_outputs, num_inputs)
            packed = pack(rows, kind, num_inputs, kernels)
            num_rows = int(rng.integers(1, 71))
            x = activations(rng, num_rows, num_inputs)
            expected = stated(x, rows, kind, kernels)

            np.testing.assert_array_equal(packed.run(x), expected, f"{num_rows} x {num_outputs} x {num_inputs}")


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_products_are_close_to_exact_products_of_the_files_values(kind, kernels, rng):
    rows, values = random_rows(rng, kind, 40, 512)
    x = rng.standard_normal((9, 512), dtype=np.float32)

    product = pack(rows, kind, 512, kernels).run(x)

    seen = x.astype(np.float64)
    if kind in BLOCK_KINDS:  # the stated arithmetic rounds activations to 8 bits, and nothing else
        numbers, scales = quantise_rows(x)
        seen = (numbers * scales[..., None].astype(np.float64)).reshape(x.shape)
        assert np.abs(seen - x).max() <= np.abs(x).max() / 254 * 1.001
    exact = seen @ values.astype(np.float64).T
    magnitude = np.abs(seen) @ np.abs(values.astype(np.float64)).T
    assert (np.abs(product - exact) <= 1e-5 * magnitude).all()


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_every_row_count_up_to_70_gives_the_same_bits(kind, kernels, rng):
    rows, _ = random_rows(rng, kind, 37, 512)
    packed = pack(rows, kind, 512, kernels)
    x = activations(rng, 70, 512)
    together = packed.run(x)

    for num_rows in range(1, 70):
        first = int(rng.integers(0, 71 - num_rows))
        part = packed.run(np.ascontiguousarray(x[first : first + num_rows]))
        np.testing.assert_array_equal(part, together[first : first + num_rows], f"rows {first} + {num_rows}")


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_threads_positions_and_large_batches_do_not_change_bits(kind, kernels, rng):
    rows, _ = random_rows(rng, kind, 83, 768)
    packed = pack(rows, kind, 768, kernels)
    x = activations(rng, 400, 768)  # more rows than one block of the loops
    order = rng.permutation(400)
    expected = packed.run(x)

    for threads in (2, 3):
        np.testing.assert_array_equal(packed.run(x, threads=threads), expected)
        np.testing.assert_array_equal(packed.run(np.ascontiguousarray(x[:3]), threads=threads), expected[:3])
    np.testing.assert_array_equal(packed.run(np.ascontiguousarray(x[order]), threads=2), expected[order])
    for row in (0, 199, 399):
        np.testing.assert_array_equal(packed.run(x[row : row + 1]), expected[row : row + 1])


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_nan_and_infinity_stay_in_their_row(kind, kernels, rng):
    rows, _ = random_rows(rng, kind, 21, 512)
    packed = pack(rows, kind, 512, kernels)
    x = rng.standard_normal((13, 512), dtype=np.float32)
    clean = packed.run(x)
    spoiled = x.copy()
    spoiled[3, 100], spoiled[6, 511], spoiled[7, 0] = np.nan, np.inf, -np.inf

    product = packed.run(spoiled)

    others = [row for row in range(13) if row not in (3, 6, 7)]
    np.testing.assert_array_equal(product[others], clean[others])
    assert np.isnan(product[3]).all()
    assert not np.isfinite(product[[6, 7]]).any()
    if kind in BLOCK_KINDS:
        assert np.isnan(product[[6, 7]]).all()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("byte", [0x00, 0x77, 0x80, 0x88, 0xFF])
def test_extreme_numbers_do_not_saturate(kind, byte, kernels):
    """All weights and all activations at the ends of their range: sums in 16 bits are as large as they get."""
    rows = np.full((17, row_bytes(kind, 512, tensor="w")), byte, np.uint8)
    blocks = rows.reshape(17, -1, KIND_LAYOUTS[kind].block_bytes)
    scale = np.array([0.5, -0.25], np.float16).view(np.uint8)
    if kind == "q6_k":
        blocks[..., 208:] = scale[:2]
    else:
        num_bytes = 4 if kind in ("q4_1", "q4_k") else 2
        blocks[..., :num_bytes] = scale[:num_bytes]
    signs = np.ones((5, 512), np.float32)
    signs[1] = -1
    signs[2, ::2] = -1
    signs[3, 256:] = -1
    signs[4, 2::4] = signs[4, 3::4] = -1

    product = pack(rows, kind, 512, kernels).run(3 * signs)

    np.testing.assert_array_equal(product, stated(3 * signs, rows, kind, kernels))


def test_tensors_of_different_kinds_lie_side_by_side_with_their_biases(kernels, rng):
    kinds = ("q4_k", "f16", "q6_k", "q8_0", "q4_1", "f32")
    sizes = (40, 3, 33, 16, 1, 18)
    tensors = [random_rows(rng, kind, size, 512)[0] for kind, size in zip(kinds, sizes, strict=True)]
    biases = [rng.standard_normal(size, dtype=np.float32) if size % 2 else None for size in sizes]
    parts = [(kind, rows.reshape(-1), len(rows), bias) for kind, rows, bias in zip(kinds, tensors, biases, strict=True)]
    packed = pack_parts(parts, 512, kernels)
    x = rng.standard_normal((11, 512), dtype=np.float32)
    columns = [
        stated(x, rows, kind, kernels) + (np.float32(0) if bias is None else bias)
        for kind, rows, bias in zip(kinds, tensors, biases, strict=True)
    ]

    for threads in (1, 2, 5):
        np.testing.assert_array_equal(packed.run(x, threads=threads), np.concatenate(columns, axis=1))
    assert packed.num_outputs == sum(sizes)


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_embeddings_are_exactly_the_files_values(kind, kernels, rng):
    rows, values = random_rows(rng, kind, 50, 512)
    packed = pack(rows, kind, 512, kernels)
    token_ids = rng.integers(0, 50, 37).astype(np.int32)

    np.testing.assert_array_equal(packed.embed(token_ids), values[token_ids])
    scaled = packed.embed(token_ids, scale=1.5)
    np.testing.assert_array_equal(scaled, values[token_ids] * np.float32(1.5))


@pytest.mark.parametrize("kind", HELD_KINDS)
def test_packed_weights_are_as_large_as_the_file(kind, rng):
    for num_outputs, padded in ((64, 64), (1008, 1008), (50, 64)):
        rows, _ = random_rows(rng, kind, num_outputs, 512)
        packed = pack(rows, kind, 512, "portable")
        assert packed.resident_bytes == padded * row_bytes(kind, 512, tensor="w")


def test_rows_that_are_no_whole_blocks_are_refused():
    for kind, num_inputs, block in (("q4_1", 48, 32), ("q8_0", 100, 32), ("q4_k", 288, 256), ("q6_k", 32, 256)):
        with pytest.raises(ValueError, match=f"{num_inputs} inputs are no multiple of {block}"):
            native.pack_linear([(kind, np.zeros(4096, np.uint8), 1, None)], num_inputs)


def test_avx512_kernels_pass_their_test_where_the_machine_has_them():
    """Without this, kernels that give other bits would only make the tests above skip."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if not {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"} <= set(flags):
        pytest.skip("this machine has no AVX-512 with VNNI")

    packed = native.pack_linear([("f32", np.zeros(4, np.uint8), 1, None)], 1, "avx2")

    assert packed.kernels == "avx512"
