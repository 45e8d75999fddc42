"""Sizes of stored rows, and which type may stand for which."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.errors import ModelFileError
from octavo.models.tensor_kinds import KIND_LAYOUTS, nearest_kind, row_bytes

HELD_BY_A_FLOAT_RUNNER = ("f32", "f16", "bf16")
HELD_BY_A_QUANTISED_RUNNER = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")


def test_layouts_are_those_of_the_format():
    for kind, layout in KIND_LAYOUTS.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
        assert (layout.block_size, layout.block_bytes) == sizes, kind


def test_every_kind_that_gguf_can_dequantise_is_known():
    decodable = {kind.name.lower() for kind in gguf.quants._type_traits} | {"f32", "f16"}

    assert set(KIND_LAYOUTS) == decodable


def test_row_takes_whole_blocks():
    assert row_bytes("q4_1", 576, tensor="t") == 576 // 32 * 20
    assert row_bytes("bf16", 7, tensor="t") == 14
    with pytest.raises(ModelFileError, match="t: rows of 576 values cannot be q4_k"):
        row_bytes("q4_k", 576, tensor="t")


@pytest.mark.parametrize("kind", KIND_LAYOUTS)
def test_kind_that_is_held_stays_as_it_is(kind):
    assert nearest_kind(kind, ("f32", kind)) == kind


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("q5_0", "q8_0"), ("q4_k", "q8_0"), ("q6_k", "f16"), ("q2_k", "f16"), ("mxfp4", "bf16"), ("bf16", "bf16")],
)
def test_other_kind_is_held_in_the_nearest_that_is_as_precise(kind, expected):
    assert nearest_kind(kind, HELD_BY_A_QUANTISED_RUNNER) == expected


def test_float_types_do_not_stand_for_each_other():
    assert nearest_kind("f16", ("f32", "bf16")) == "f32"
    assert nearest_kind("bf16", ("f32", "f16")) == "f32"


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k", "q3_k", "q2_k", "mxfp4"])
def test_held_type_adds_less_error_than_the_stored_type_has_already(kind):
    """Random blocks, requantised to the held type: off by less than half of one step of their own."""
    type_id = gguf.GGMLQuantizationType[kind.upper()]
    layout = KIND_LAYOUTS[kind]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (64, layout.block_bytes), dtype=np.uint8)
    _tame_scales(blocks, kind, rng)
    values = gguf.quants.dequantize(blocks, type_id)

    for held in (HELD_BY_A_FLOAT_RUNNER, HELD_BY_A_QUANTISED_RUNNER):
        target = nearest_kind(kind, held)
        if target == kind:
            continue
        again = _round_trip(values, target)
        by_scale = values.reshape(-1, 16)
        steps = np.array([np.diff(np.unique(block)).min(initial=np.inf) for block in by_scale])
        error = np.abs(again.reshape(-1, 16) - by_scale).max(axis=1)
        assert (error <= 0.5 * steps)[np.isfinite(steps)].all(), (kind, target)


def _tame_scales(blocks, kind, rng):
    """Give the f16 scales (random bits so far) sizes that weights have."""
    places = {"q6_k": [208], "q3_k": [108], "q2_k": [80, 82]}.get(kind, [0])
    if kind in ("q4_1", "q5_1"):
        places = [0, 2]
    if kind == "mxfp4":
        blocks[:, 0] = rng.integers(118, 128, len(blocks))
        return
    for place in places:
        scales = rng.uniform(0.001, 0.002, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)


def _round_trip(values, kind):
    if kind == "f32":
        return values
    if kind == "f16":
        return values.astype(np.float16).astype(np.float32)
    type_id = gguf.GGMLQuantizationType[kind.upper()]
    return gguf.quants.dequantize(gguf.quants.quantize(values, type_id), type_id)
