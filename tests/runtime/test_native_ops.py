"""Each op of the native executor means what models/program.py says, on fresh random rows and poisoned outputs."""

from array import array
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.models.kv_record import is_quantised
from octavo.models.program import Activate, Add, HeadRmsNorm, Linear, RmsNorm, RopeStore, SelectRows
from octavo.models.spec import Rope
from octavo.runtime.hadamard import hadamard
from octavo.runtime.kv_codes import quantise
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.testing.hand_plans import Chunk, make_plan
from octavo.testing.native_probe import INPUT, probe

ISAS = ("portable", "avx2")
WIDTHS = [1, 7, 8, 31, 33, 64, 100, 576]


@pytest.fixture(params=ISAS)
def isa(request):
    from octavo.runtime import _native

    try:
        _native.isa_name(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return request.param


def rows_of(rng, width, *, num_rows=None):
    num_rows = num_rows or int(rng.integers(1, 71))
    return (rng.standard_normal((num_rows, width)) * rng.choice([1e-3, 1, 30], (num_rows, 1))).astype(np.float32)


def run(runner, num_rows, *, selected=()):
    """Execute one step over all rows of the table."""
    tables = [list(range(1, -(-num_rows // 16) + 1))]
    plan = make_plan([Chunk("a", range(num_rows), tables=tables, sample=None, targets=())])
    if selected:
        plan = replace(plan, selected_rows=array("i", selected))
    runner.execute(plan)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_rms_norm_divides_by_the_root_mean_square(rng, isa, width, threads):
    table, weight = rows_of(rng, width), rng.standard_normal(width).astype(np.float32)
    ops = [RmsNorm(x=INPUT, out="out", weight="norm", eps=1e-5)]
    runner = probe(ops, table, buffers={"out": width}, weights={"norm": weight}, threads=threads, isa=isa)

    run(runner, len(table))

    exact = table.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(runner.read_buffer("out", len(table)), want, rtol=2e-6, atol=1e-7)


def test_head_norm_treats_each_head_of_its_slice_alone(rng, isa):
    table, weight = rows_of(rng, 40 + 5 * 24 + 9), rng.standard_normal(24).astype(np.float32)
    ops = [HeadRmsNorm(x=INPUT, offset=40, num_heads=5, head_dim=24, weight="norm", eps=1e-6)]
    runner = probe(ops, table, buffers={}, weights={"norm": weight}, sizes={"head_dim": 24}, isa=isa)

    run(runner, len(table))

    got = runner.read_buffer(INPUT, len(table))
    heads = table[:, 40:160].astype(np.float64).reshape(-1, 5, 24)
    want = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(got[:, 40:160], want.reshape(-1, 120), rtol=2e-6, atol=1e-7)
    assert np.array_equal(got[:, :40], table[:, :40])
    assert np.array_equal(got[:, 160:], table[:, 160:])


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_gates_with_silu(rng, isa, width):
    table = rows_of(rng, 2 * width)
    table[0, 0] = -200.0  # exp(200) is no float
    runner = probe([Activate(x=INPUT, out="out", kind="silu")], table, buffers={"out": width}, isa=isa)

    run(runner, len(table))

    gate, up = np.split(table.astype(np.float64), 2, axis=1)
    want = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(runner.read_buffer("out", len(table)), want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_product_with_bias(rng, isa, width):
    table = rows_of(rng, width)
    weights = {
        "w": rng.standard_normal((width, width)).astype(np.float32),
        "b": rng.standard_normal(width).astype(np.float32),
    }
    ops = [Linear(x=INPUT, out="y", weights=("w",), biases=("b",)), Add(x=INPUT, y="y")]
    runner = probe(ops, table, buffers={"y": width}, weights=weights, threads=2, isa=isa)

    run(runner, len(table))

    product = runner.read_buffer("y", len(table))
    size = np.abs(table.astype(np.float64)) @ np.abs(weights["w"].T) + 1
    want = table.astype(np.float64) @ weights["w"].T + weights["b"]
    assert np.all(np.abs(product - want) <= 1e-6 * size)
    assert np.array_equal(runner.read_buffer(INPUT, len(table)), table + product)


def test_selection_copies_rows_in_tiles(rng, isa):
    """Seven rows in tiles of three: the last tile holds one."""
    table = rows_of(rng, 20, num_rows=50)
    ops = [SelectRows(x=INPUT, out="out")]
    selected = [2, 3, 5, 30, 31, 32, 49]
    options = {"selected": {"out": 20}, "logits": "out", "max_selected_rows": 3, "isa": isa}
    runner = probe(ops, table, buffers={}, num_blocks=4, **options)

    run(runner, 50, selected=selected)

    assert np.array_equal(runner.read_buffer("out", 1), table[[49]])


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "bf16", "int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize(("rotary_dim", "kind"), [(0, "none"), (24, "default"), (32, "linear"), (32, "yarn")])
def test_rotation_and_stored_bytes_equal_the_reference_bit_for_bit(rng, isa, rotary_dim, kind, kv_cache_dtype):
    """Positions up to 3,000, values that overflow and underflow 16 bits, shuffled blocks of 32."""
    num_rows, num_heads, num_kv_heads, head_dim = 3000, 4, 2, 32
    width = (num_heads + 2 * num_kv_heads) * head_dim
    table = rows_of(rng, width, num_rows=num_rows)
    table[::7] *= 10.0 ** rng.integers(-9, 6, (len(table[::7]), 1))
    rope = Rope(rotary_dim=rotary_dim, kind=kind, factor=4.0, original_max_position=512, attention_factor=1.14)
    ops = [RopeStore(qkv=INPUT, layer=0), SelectRows(x=INPUT, out="logits")]  # nothing is selected
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "rope": rope}
    options = {"num_blocks": 120, "block_size": 32, "kv_cache_dtype": kv_cache_dtype}
    ends = {"selected": {"logits": width}, "logits": "logits"}
    runner = probe(ops, table, buffers={}, sizes=sizes, threads=2, isa=isa, **ends, **options)
    block_ids = [int(each) for each in rng.permutation(np.arange(1, 121))]
    plan = make_plan([Chunk("a", range(num_rows), tables=[block_ids], sample=None)], new_blocks=block_ids)

    runner.execute(plan)

    if kind == "none":
        heads = table[:, num_heads * head_dim :].reshape(num_rows, 2, num_kv_heads, head_dim)
        want = as_stored(heads[:, 0], heads[:, 1], kv_cache_dtype)
    else:
        want = reference_rows(runner, table, plan, options, block_ids)
    for stored, numbers in zip(runner.read_kv(0, block_ids, num_rows), want, strict=True):
        assert stored.dtype == numbers.dtype
        assert np.array_equal(stored, numbers)


def reference_rows(runner, table, plan, options, block_ids):
    """Keys and values that the reference runner stores for the same program."""
    reference = ReferenceRunner(runner.spec, runner.program, {"table": table}, **options)
    reference.execute(plan)
    return reference.read_kv(0, block_ids, len(table))


def as_stored(keys, values, kv_cache_dtype):
    if not is_quantised(kv_cache_dtype):
        return [as_rounded(part, kv_cache_dtype) for part in (keys, values)]
    rows = [hadamard(part) if kv_cache_dtype == "int4" else part for part in (keys, values)]
    (key_codes, key_scales), (value_codes, value_scales) = (quantise(part, kv_cache_dtype) for part in rows)
    return [key_codes, value_codes, key_scales[..., None], value_scales[..., None]]


def as_rounded(numbers, kv_cache_dtype):
    if kv_cache_dtype == "bf16":
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32 if kv_cache_dtype == "f32" else np.float16)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("head_dim", [32, 36, 6])
def test_codes_of_rows_that_are_not_ordinary_equal_the_reference_bit_for_bit(rng, isa, head_dim, kv_cache_dtype):
    """Zeros of both signs, NaN, infinities, an outlier, rows too small for a scale and too large for a transform."""
    width = 3 * head_dim
    table = rows_of(rng, width, num_rows=40)
    table[1], table[2] = 0.0, -0.0
    table[3, head_dim + 1], table[4, -1], table[5, head_dim] = np.nan, np.inf, -np.inf
    table[6, head_dim + 2] = 1e35
    table[7:14] = rng.uniform(-1, 1, (7, width)) * np.array([1e-44, 1e-43, 1e-41, 1e-38, 1e36, 1e37, 3e38])[:, None]
    table[14:17] = np.array([1e-45, -1e-45, 3e-39], np.float32)[:, None]
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head_dim}
    ends = {"selected": {"logits": width}, "logits": "logits"}
    ops = [RopeStore(qkv=INPUT, layer=0), SelectRows(x=INPUT, out="logits")]
    runner = probe(ops, table, buffers={}, sizes=sizes, isa=isa, kv_cache_dtype=kv_cache_dtype, **ends)

    runner.execute(make_plan([Chunk("a", range(40), tables=[[1, 2, 3]], sample=None)]))

    want = as_stored(table[:, None, head_dim : 2 * head_dim], table[:, None, 2 * head_dim :], kv_cache_dtype)
    for stored, numbers in zip(runner.read_kv(0, [1, 2, 3], 40), want, strict=True):
        assert stored.dtype == numbers.dtype
        assert np.array_equal(stored, numbers)
