"""What is timed is what is counted: operations and bytes by hand, and real blocks under every request."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.models.kv_groups import make_kv_groups
from octavo.runtime import kernel_speed
from octavo.runtime.kernel_speed import Batch, fitting, measure_layers, measure_sampling
from octavo.runtime.machine_limits import limits_with_threads
from octavo.testing.random_weights import make_random_model

SPEC = make_random_model(num_heads=6, num_kv_heads=2, head_dim=8, hidden_size=40, intermediate_size=72).spec
DECODE = Batch(num_requests=3, num_rows=1, start=19)
PREFILL = Batch(num_requests=1, num_rows=10, start=20)


def measure(spec=SPEC, batches=(DECODE, PREFILL), **options):
    return list(measure_layers(spec, batches, **({"kv_cache_dtype": "f16", "threads": 2} | options)))


def test_attention_is_timed_for_each_batch_and_row_wise_kernels_once():
    calls = []

    speeds = measure(batches=(DECODE, PREFILL, PREFILL), on_batch=lambda: calls.append(1))

    assert [speed.kernel for speed in speeds] == [
        "attention, decode",
        "attention, prefill",
        "attention, prefill",
        "norm",
        "rotate and store",
        "add",
        "activate",
    ]
    assert len(calls) == 3
    assert all(speed.wall_s > 0 for speed in speeds)


def test_attention_counts_two_products_with_every_token_seen():
    decode, prefill, *_ = measure()

    assert (decode.num_rows, decode.context_tokens) == (3, 20)
    assert decode.flop == 3 * (20 * 6 * 8 * 2) * 2
    assert prefill.flop == sum(range(21, 31)) * 6 * 8 * 4
    stored = 20 * 2 * 2 * 8 * 2
    assert decode.num_bytes == 3 * (stored + 2 * 6 * 8 * 4)
    assert prefill.num_bytes == 30 * 2 * 2 * 8 * 2 + 10 * 2 * 6 * 8 * 4


def test_window_limits_what_is_counted():
    spec = replace(SPEC, kv_groups=make_kv_groups((4, 4)))

    decode, prefill, *_ = measure(spec, kv_cache_dtype="f32")

    assert decode.flop == 3 * 4 * 6 * 8 * 4
    assert prefill.flop == 10 * 4 * 6 * 8 * 4
    assert prefill.num_bytes == 13 * 2 * 2 * 8 * 4 + 10 * 2 * 6 * 8 * 4


def test_row_wise_kernels_count_what_they_read_and_write():
    *_, norm, rope, add, activate = measure()

    assert {speed.num_rows for speed in (norm, rope, add, activate)} == {10}
    assert norm.num_bytes == 10 * 2 * 40 * 4
    assert add.num_bytes == 10 * 3 * 40 * 4
    assert activate.num_bytes == 10 * (2 * 72 + 72) * 4
    assert rope.num_bytes == 10 * ((2 * (48 + 16) + 16) * 4 + 2 * 16 * 2)


def test_layers_of_two_groups_have_blocks_of_their_own():
    spec = replace(SPEC, num_layers=4, kv_groups=make_kv_groups((None, 4, None, 4)))

    assert len(spec.kv_groups) == 2
    assert measure(spec)[0].flop == 3 * 20 * 6 * 8 * 4


def test_many_layers_are_cut_to_what_the_pool_holds(monkeypatch):
    layer_bytes = (3 * 20) * 2 * 2 * 8 * 2
    monkeypatch.setattr(kernel_speed, "_POOL_BYTES", 3 * layer_bytes)

    timed = kernel_speed._shortened(replace(SPEC, num_layers=9, kv_groups=make_kv_groups((None,) * 9)), 60, "f16")

    assert timed.num_layers == 3
    assert [group.layers for group in timed.kv_groups] == [(0, 1, 2)]


def test_batches_beyond_the_models_context_are_left_out():
    assert fitting((DECODE, PREFILL), 25) == (DECODE,)
    assert fitting((DECODE, PREFILL), 30) == (DECODE, PREFILL)


def test_sampling_reads_a_row_of_logits_for_each_request():
    greedy, nucleus = measure_sampling(SPEC, threads=2)

    assert (greedy.kernel, nucleus.kernel) == ("sample, greedy", "sample, top_p 0.95")
    assert greedy.num_bytes == 64 * SPEC.vocab_size * 4
    assert greedy.wall_s > 0


def test_limits_are_measured_with_the_threads_asked_for():
    limits = limits_with_threads(1)

    assert limits.sgemm_flops > 1e6
    assert limits.read_bytes_per_s > 1e6
