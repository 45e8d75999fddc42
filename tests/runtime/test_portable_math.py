"""exp and sums in a written-down order: equal to the same order in plain Python, number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.runtime.portable_math import LOWEST_EXPONENT, lane_sum, portable_exp


def exp_in_plain_python(x):
    """The docstring of `portable_exp`, spelled with Python floats."""
    if x < LOWEST_EXPONENT:
        return 0.0
    k = round(x * 1.4426950408889634)  # Python rounds halves to even
    high, low = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
    r = (x - k * high) - k * low
    p = 1.0 / math.factorial(13)
    for n in range(12, -1, -1):
        p = p * r + 1.0 / math.factorial(n)
    return math.ldexp(p, k)


@pytest.fixture(scope="module")
def exponents():
    rng = np.random.default_rng(3)
    spread = -rng.random(4000) * 720
    near_zero = -rng.random(4000) * 2
    halves = -np.arange(200) * math.log(2) / 2
    return np.concatenate([spread, near_zero, halves, [0.0, -0.0, -708.0, -708.1, -1e300, -np.inf]])


def test_exp_equals_the_written_order_to_the_bit(exponents):
    expected = [exp_in_plain_python(x) for x in exponents.tolist()]

    assert portable_exp(exponents).tolist() == expected


def test_exp_is_within_two_units_in_the_last_place(exponents):
    x = exponents[exponents >= LOWEST_EXPONENT]
    expected = np.array([math.exp(value) for value in x])

    assert np.max(np.abs(portable_exp(x) - expected) / np.spacing(expected)) <= 2


def test_exp_of_zero_is_one_and_of_minus_infinity_zero():
    assert portable_exp(np.array([0.0, -np.inf, -709.0])).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100, 4099])
def test_lane_sum_equals_the_written_order_to_the_bit(length):
    values = (np.random.default_rng(length).random(length) * 10.0 ** np.arange(length).clip(0, 12)).tolist()
    lanes = [0.0] * 16
    for index, value in enumerate(values):
        lanes[index % 16] += value
    total = 0.0
    for lane in lanes:
        total += lane

    assert lane_sum(np.array(values)) == total
