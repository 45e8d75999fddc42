"""Counter-based random numbers: known answers, and independence of neighbouring seeds and positions."""

from __future__ import annotations

import math

import pytest

from octavo.runtime.counter_rng import philox4x32, uniform

ALL_ONES = 0xFFFF_FFFF
# Known-answer vectors of Philox4x32-10, as published with the generator.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_built_from_the_first_two_words():
    low, high = KNOWN_ANSWERS[0][2][:2]

    assert uniform(0, 0) == ((high * 2**32 + low) // 2**11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63 - 1, -(2**63)])
def test_the_same_seed_and_position_give_the_same_number(seed):
    numbers = [uniform(seed, position) for position in range(100)]

    assert numbers == [uniform(seed, position) for position in range(100)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert len(set(numbers)) == 100


def test_seeds_of_64_bits_all_count():
    """-1 is 2^64 - 1 in two's complement; seeds that differ in the upper half alone differ."""
    assert len({uniform(seed, 5) for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63))}) == 6


def lag_correlation(numbers, others):
    mean = 0.5
    covariance = sum((a - mean) * (b - mean) for a, b in zip(numbers, others, strict=True)) / len(numbers)
    return covariance * 12  # the variance of a uniform number is 1/12


@pytest.mark.parametrize("of", ["positions", "seeds"])
def test_numbers_spread_evenly_over_positions_and_over_seeds(of):
    """20,000 numbers in 64 bins: the statistic has mean 63 and a standard deviation of 11.2; 120 is 5 of those away."""
    numbers = [uniform(7, i) if of == "positions" else uniform(i, 7) for i in range(20_000)]
    counts = [0] * 64
    for number in numbers:
        counts[int(number * 64)] += 1

    expected = len(numbers) / 64
    assert sum((count - expected) ** 2 / expected for count in counts) < 120
    assert abs(lag_correlation(numbers[:-1], numbers[1:])) < 5 / math.sqrt(len(numbers))


def test_answers_of_one_request_draw_independently():
    """Answer i of n draws with seed + i: numbers of seed and seed + 1 at equal positions must not correlate."""
    one = [uniform(42, position) for position in range(10_000)]
    next_one = [uniform(43, position) for position in range(10_000)]

    assert abs(lag_correlation(one, next_one)) < 5 / math.sqrt(len(one))
