"""The ceiling that a device's speed sets, against sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.planner.devices import find_device
from octavo.planner.roofline import (
    MOST_REQUESTS,
    DecodeWork,
    device_ceiling,
    kv_tokens_like_weights,
    measured_speed,
    roofline_speed,
)

# 100 GB/s and 1 TFLOP/s; 10 GB of weights, 0.1 GB of cache a request, 20 GFLOP a token.
SPEED = measured_speed(gb_per_s=100, gflop_per_s=1000, source="by hand")
WORK = DecodeWork(weight_bytes=10e9, kv_bytes_per_request=0.1e9, flop_per_request=20e9)


def test_a_step_reads_the_weights_once_and_each_requests_cache():
    assert WORK.read_bytes(1) == pytest.approx(10.1e9)
    assert WORK.read_bytes(3) == pytest.approx(10.3e9)
    # Reading 10.1 GB takes 101 ms; computing 20 GFLOP takes 20 ms.
    assert WORK.step_time_s(1, SPEED) == pytest.approx(0.101)
    assert WORK.bound(1, SPEED) == "bandwidth"
    # Five requests: 10.5 GB in 105 ms; 100 GFLOP in 100 ms. Six: 106 ms against 120 ms.
    assert WORK.step_time_s(5, SPEED) == pytest.approx(0.105)
    assert WORK.step_time_s(6, SPEED) == pytest.approx(0.120)
    assert WORK.bound(6, SPEED) == "compute"


def test_the_ceiling_is_the_last_number_of_requests_that_keeps_the_latency():
    ceiling = device_ceiling(WORK, SPEED, itl_s=0.2)
    assert (ceiling.num_requests, ceiling.bound, ceiling.label) == (10, "compute", "measured")
    assert ceiling.itl_s == 0.2
    assert ceiling.step_time_s == pytest.approx(0.2)
    assert device_ceiling(WORK, SPEED, itl_s=0.199).num_requests == 9


def test_a_latency_that_even_one_request_misses_holds_none_and_says_what_one_takes():
    ceiling = device_ceiling(WORK, SPEED, itl_s=0.1)
    assert ceiling.num_requests == 0
    assert ceiling.step_time_s == pytest.approx(0.101)
    assert ceiling.bound == "bandwidth"


def test_the_smaller_of_memory_and_speed_binds():
    ceiling = device_ceiling(WORK, SPEED, itl_s=0.2)
    assert ceiling.binds(11)
    assert not ceiling.binds(10)
    assert not ceiling.binds(9.5)


def test_the_search_ends_somewhere():
    free = DecodeWork(weight_bytes=1, kv_bytes_per_request=0, flop_per_request=1)
    assert device_ceiling(free, SPEED, itl_s=1).num_requests == MOST_REQUESTS


def test_more_tokens_of_a_mixture_visit_more_of_its_experts():
    # 2 of 8 experts a token: a quarter is read for one, 1 - (3/4)^2 = 7/16 for two, nearly all for many.
    work = DecodeWork(
        weight_bytes=1e9, expert_bytes=16e9, expert_share=0.25, kv_bytes_per_request=0, flop_per_request=1e9
    )
    assert work.read_bytes(1) == pytest.approx(5e9)
    assert work.read_bytes(2) == pytest.approx(8e9)
    assert work.read_bytes(100) == pytest.approx(17e9)


@given(
    weights=st.floats(1e6, 1e12),
    kv=st.floats(0, 1e10),
    flop=st.floats(1e6, 1e13),
    itl=st.floats(1e-4, 10),
)
def test_one_more_request_than_the_ceiling_misses_the_latency(weights, kv, flop, itl):
    work = DecodeWork(weight_bytes=weights, kv_bytes_per_request=kv, flop_per_request=flop)
    held = device_ceiling(work, SPEED, itl_s=itl).num_requests
    if held:
        assert work.step_time_s(held, SPEED) <= itl
    if held < MOST_REQUESTS:
        assert work.step_time_s(held + 1, SPEED) > itl


def test_rates_of_a_known_device_are_a_stated_share_of_its_peaks():
    speed = roofline_speed(find_device("h100-sxm"))
    assert speed.label == "roofline"
    assert speed.bandwidth_bytes_per_s == pytest.approx(0.8 * 3.35e12)
    assert speed.flop_per_s == pytest.approx(0.6 * 989e12)
    assert "80%" in speed.source and "60%" in speed.source and "3,350 GB/s" in speed.source
    fp8 = roofline_speed(find_device("h100-sxm"), weight_dtype="fp8")
    assert fp8.flop_per_s == pytest.approx(0.6 * 1979e12)
    # An A100 has no fp8 units: 8-bit weights are computed at the 16-bit rate.
    assert roofline_speed(find_device("a100-80-sxm"), weight_dtype="fp8").flop_per_s == pytest.approx(0.6 * 312e12)
    # What it computes is not known, so no ceiling is made up.
    assert roofline_speed(find_device("gb10")) is None


def test_an_eight_billion_model_on_an_h100_reads_its_weights_in_six_milliseconds():
    # Llama 3.1 8B: 16.06 GB of weights, 128 KiB a token. One request of 1,000 tokens.
    work = DecodeWork(
        weight_bytes=2 * 8_030_261_248, kv_bytes_per_request=131_072 * 1000, flop_per_request=2 * 8_030_261_248
    )
    speed = roofline_speed(find_device("h100"))
    assert work.step_time_s(1, speed) == pytest.approx((16_060_522_496 + 131_072_000) / 2.68e12)
    assert device_ceiling(work, speed, itl_s=0.02).num_requests == (0.02 * 2.68e12 - 16_060_522_496) // 131_072_000


def test_cache_and_weights_are_equal_at_a_number_of_tokens():
    # The 8B model again: 16,060,522,496 / 131,072 = 122,532.06, and a token is whole
    assert kv_tokens_like_weights(weight_bytes=16_060_522_496, token_bytes=131_072) == 122_533
    assert kv_tokens_like_weights(weight_bytes=100, token_bytes=10) == 10
