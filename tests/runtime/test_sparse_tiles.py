"""Sparse reading: the tiles a query reads, in both runners, and that nothing but its own tokens decides them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError
from octavo.models.decoder import emit_decoder
from octavo.models.kv_record import kv_record
from octavo.models.sparse import NUM_DENSE_LAYERS, with_sparse_blocks
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.reference_runner import ReferenceRunner
from octavo.runtime.sparse_tiles import chosen_tiles, tile_bounds
from octavo.testing.exact_runs import ExactRun, Pressure, run
from octavo.testing.native_probe import pack_arrays
from octavo.testing.random_weights import make_random_model
from octavo.testing.scored_text import num_blocks_for, score_text

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MODEL = make_random_model(windows=(None,) * 4, **SIZES)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3)
WAYS = (("reference", 5), ("native", 5), ("native", 0))
LENGTHS = (3, 40, 100, 130, 131, 200)


def sparse(num_chosen: int, model=MODEL):
    """Return spec and program of the model when each query reads so many tiles."""
    spec = with_sparse_blocks(model.spec, num_chosen)
    return spec, emit_decoder(spec)


def make_runner(runner: str, num_chosen: int, dtype: str = "f32", model=MODEL, **options: Any):
    spec, program = sparse(num_chosen, model)
    common = {"num_blocks": 64, "block_size": 16, "kv_cache_dtype": dtype, "poison": True} | options
    if runner == "reference":
        kept = {name: value for name, value in common.items() if name != "threads"}
        return ReferenceRunner(spec, program, model.weights, **kept)
    weights = pack_arrays(model.weights, program, weight_dtype="f32")
    limits = {"threads": 1, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    return NativeRunner(spec, program, weights, **limits | common)


def score(runner: str, num_chosen: int, token_ids, dtype: str = "f32", model=MODEL) -> np.ndarray:
    spec, _ = sparse(num_chosen, model)
    made = make_runner(runner, num_chosen, dtype, model, num_blocks=num_blocks_for(spec, 512, 16))
    return score_text(made, spec, token_ids, block_size=16)


def tokens(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, MODEL.spec.vocab_size, length).tolist()


def test_bounds_hold_every_product_of_a_query_with_a_key_of_the_tile():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((2, 100, 16)).astype(np.float32)
    lows, highs = tile_bounds(keys)

    assert lows.shape == (2, 6, 16), "a tile that is not whole has no bounds"
    tiles = keys[:, :96].reshape(2, 6, 16, 16)
    assert (lows[:, :, None] <= tiles).all() and (highs[:, :, None] >= tiles).all()
    assert (lows.view(np.uint32) & 0xFFFF == 0).all() and (highs.view(np.uint32) & 0xFFFF == 0).all()
    query = rng.standard_normal(16).astype(np.float32)
    bound = np.maximum(query * lows, query * highs).sum(axis=-1)
    assert (bound[:, :, None] >= (tiles @ query) - 1e-5).all()


def test_a_row_reads_the_first_tile_its_own_and_the_most_promising_others():
    keys = np.zeros((1, 160, 4), np.float32)
    keys[0, 16 * 3 : 16 * 4, 0] = 5.0
    keys[0, 16 * 6 : 16 * 7, 0] = 9.0
    queries = np.tile(np.array([1.0, 0, 0, 0], np.float32), (2, 1, 1))
    positions = np.array([130, 20])

    chosen = chosen_tiles(queries, *tile_bounds(keys), positions, 4)

    assert np.flatnonzero(chosen[0, 0]).tolist() == [0, 3, 6, 8]
    assert np.flatnonzero(chosen[1, 0]).tolist() == [0, 1], "a short context is read whole"


def test_of_equal_tiles_the_earlier_ones_are_read():
    queries = np.ones((1, 1, 4), np.float32)
    keys = np.ones((1, 160, 4), np.float32)

    chosen = chosen_tiles(queries, *tile_bounds(keys), np.array([150]), 5)

    assert np.flatnonzero(chosen[0, 0]).tolist() == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("runner", ["reference", "native"])
def test_reading_as_many_tiles_as_there_are_changes_no_bit(runner):
    dense, whole = score(runner, 0, tokens(200)), score(runner, 13, tokens(200))

    assert np.array_equal(dense, whole)


@pytest.mark.parametrize("dtype", ["f32", "int8", "int4"])
def test_native_and_reference_read_the_same_tiles(dtype):
    wanted = score("reference", 5, tokens(400), dtype)
    found = score("native", 5, tokens(400), dtype)
    dense = score("native", 0, tokens(400), dtype)

    assert np.abs(found - wanted).max() < 1e-3
    assert np.abs(found - dense).max() > 0.05, "what is not read matters"


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 20), (8, 1, 64), (3, 3, 12)])
def test_heads_of_any_width_and_group_read_the_same_tiles_in_both_runners(num_heads, num_kv_heads, head_dim):
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    model = make_random_model(windows=(None,) * 4, **SIZES | heads)
    wanted, found, dense = (score(*way, tokens(400), model=model) for way in WAYS)

    assert np.abs(found - wanted).max() < 1e-3
    assert np.abs(found - dense).max() > 0.05, "what is not read matters"


def test_of_equal_tiles_both_runners_read_the_earlier_ones():
    """Keys of nothing but zeros, of both signs: every tile is as promising as every other."""
    weights = {name: array * 0.0 if name.endswith(".k") else array for name, array in MODEL.weights.items()}
    flat = replace(MODEL, weights=weights)
    wanted, found, dense = (score(*way, tokens(400), model=flat) for way in WAYS)

    assert any(name.endswith(".k") for name in weights)
    assert np.abs(found - wanted).max() < 1e-3
    assert np.abs(found - dense).max() > 0.05, "what is not read matters"


@pytest.mark.parametrize("dtype", ["f16", "bf16", "fp8_e4m3"])
def test_rows_that_are_no_near_tie_agree_where_stored_keys_may_differ_in_a_last_bit(dtype):
    """The runners sum in different orders, so a key can round to another 16-bit neighbour, and a near tie tip over."""
    wanted, found = (score(runner, 10, tokens(400), dtype) for runner in ("reference", "native"))

    worst = np.abs(found - wanted).max(axis=1)
    assert np.median(worst) < 1e-3
    assert (worst > 1e-3).mean() < 0.02


def test_company_chunks_hits_copies_preemption_and_blocks_change_no_bit_of_the_reference():
    """The native runner's cells are in tests/exactness/test_kv_matrix.py."""
    spec, _ = sparse(4)
    prompts = [tokens(length) for length in LENGTHS]
    prompts.append([*prompts[-1][:150], 1, 2, 3])  # shares 9 tiles and 6 tokens of the tenth

    def made(pressure: Pressure):
        return make_runner("reference", 4, "f16", num_blocks=pressure.num_blocks, block_size=pressure.block_size)

    def answer(*, num_rounds: int = 1, **pressure: Any) -> ExactRun:
        return run(spec, made, prompts, PARAMS, Pressure(**pressure), num_rounds=num_rounds)

    alone = answer()
    batch = answer(max_num_seqs=8)
    chunked = answer(max_num_batched_tokens=7, max_num_seqs=3)
    warm = answer(max_num_seqs=8, is_caching=True, num_rounds=2)
    squeezed = answer(max_num_seqs=8, num_blocks=20, max_model_len=256)
    wide = answer(max_num_seqs=8, block_size=32, max_num_batched_tokens=64)

    assert warm.metrics.num_hit_tokens > 0 and warm.num_copies > 0 and squeezed.metrics.num_preemptions > 0
    for other in (batch, chunked, warm, squeezed, wide):
        assert other.answers == alone.answers


def test_the_record_of_a_block_has_room_for_bounds_in_all_but_the_first_layers():
    plain = kv_record(MODEL.spec, dtype="f16", block_size=32)
    bounded = kv_record(replace(MODEL.spec, sparse_blocks=8), dtype="f16", block_size=32)

    per_layer = 2 * 2 * (2 * 16) * 2  # tiles x heads x (least and greatest of 16 dimensions) x bytes of bf16
    assert bounded.block_bytes - plain.block_bytes == (4 - NUM_DENSE_LAYERS) * per_layer


def test_models_with_windows_are_refused():
    windowed = make_random_model(windows=(None, 20), **SIZES)

    with pytest.raises(InvalidParameterError, match="does not suit this model"):
        with_sparse_blocks(windowed.spec, 8)
