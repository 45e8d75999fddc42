"""Do draws follow the distribution that the parameters describe? 20,000 draws for each of 32 settings, chi-square.

The expected distribution comes from plain Python lists, written from `SamplingParams`' docstring alone. All seeds are
fixed: a passing test passes for ever, and the bounds say how unlikely a lucky or unlucky choice of seeds was.
"""

from __future__ import annotations

import math
from array import array
from functools import cache

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.core.step import SampleRow
from octavo.runtime.counter_rng import uniform
from octavo.runtime.sampler import adjust, candidates, draw, sample

NUM_DRAWS = 20_000
LOGITS = np.array(
    [1.5, -0.25, 3.0, 0.0, 2.0, 2.0, -4.0, 0.75, 1.0, -1.0, 2.5, 0.5, -2.0, 1.25, 3.0, -0.5, 0.1, 1.9, -6.0, 2.2],
    np.float32,
)
PROMPT, OUTPUT, BANNED = (2, 2, 7, 11), (14, 14, 14, 2, 10, 5), (4, 16)

SETTINGS = [
    {},
    {"temperature": 0.25},
    {"temperature": 0.7},
    {"temperature": 1.7},
    {"temperature": 5.0},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 5},
    {"top_k": 12, "temperature": 2.0},
    {"top_k": 19, "temperature": 3.0},
    {"top_p": 0.1},
    {"top_p": 0.35},
    {"top_p": 0.6},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.9, "temperature": 0.5},
    {"top_p": 0.9, "temperature": 2.0},
    {"min_p": 0.02},
    {"min_p": 0.2},
    {"min_p": 0.5},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 8, "top_p": 0.7},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
    {"top_k": 3, "min_p": 0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.6},
    {"repetition_penalty": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"logit_bias": {0: 2.0, 2: -100.0, 18: 6.5}},
    {"logit_bias": {6: 5.0}, "frequency_penalty": -0.3, "top_p": 0.8, "temperature": 0.9},
]


def expected_distribution(params):
    """Token id to probability, from the parameters' own words."""
    logits = [float(value) for value in LOGITS]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in BANNED:
        logits[token] = -math.inf
    for token in set(PROMPT) | set(OUTPUT):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(OUTPUT):
        logits[token] -= params.presence_penalty + params.frequency_penalty * OUTPUT.count(token)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = {token: math.exp((logits[token] - max(logits)) / params.temperature) for token in order}
    weights = {token: weight for token, weight in weights.items() if weight > 0 and weight >= params.min_p}
    if params.top_k > 0:
        weights = dict(list(weights.items())[: params.top_k])
    total, reached, kept = sum(weights.values()), 0.0, {}
    for token, weight in weights.items():
        kept[token] = weight
        reached += weight
        if params.top_p < 1 and reached >= params.top_p * total:
            break
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@cache
def uniforms(seed):
    return [uniform(seed, position) for position in range(NUM_DRAWS)]


def make_row(params, *, seed=0, position=0):
    return SampleRow(
        request_id="r",
        logits_row=0,
        position=position,
        params=params,
        seed=seed,
        banned_token_ids=BANNED,
        prompt_token_ids=array("i", PROMPT),
        output_token_ids=array("i", OUTPUT),
    )


def deviations(observed, expected):
    """How many standard deviations the chi-square statistic lies above its mean (Wilson and Hilferty's cube root).

    Tokens expected fewer than 5 times share a bin.
    """
    bins = [(observed.get(t, 0), p * NUM_DRAWS) for t, p in expected.items() if p * NUM_DRAWS >= 5]
    rare = [(observed.get(t, 0), p * NUM_DRAWS) for t, p in expected.items() if p * NUM_DRAWS < 5]
    if sum(p for _, p in rare) >= 5:
        bins.append((sum(o for o, _ in rare), sum(p for _, p in rare)))
    degrees = len(bins) - 1
    if degrees < 1:
        return 0.0
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("index", range(len(SETTINGS)), ids=[str(setting) for setting in SETTINGS])
def test_draws_follow_the_distribution_of_the_parameters(index):
    """4 deviations: one setting in 30,000 would fail by chance. A wrong order of two filters gives hundreds."""
    params = SamplingParams(**SETTINGS[index])
    expected = expected_distribution(params)
    kept, weights = candidates(adjust(LOGITS.astype(np.float64), make_row(params)), params)

    observed = {}
    for u in uniforms(seed=1000 + index % 4):
        token = draw(kept, weights, u)
        observed[token] = observed.get(token, 0) + 1

    assert kept.tolist() == sorted(expected)
    assert set(observed) <= set(expected)
    assert deviations(observed, expected) < 4


@pytest.mark.parametrize("setting", SETTINGS[::5], ids=str)
def test_sample_is_these_parts_in_a_row(setting):
    params = SamplingParams(**setting)
    parts = candidates(adjust(LOGITS.astype(np.float64), make_row(params)), params)

    for position in range(100):
        row = make_row(params, seed=9, position=position)
        assert sample(LOGITS, row).token_id == draw(*parts, uniform(9, position))


def test_the_whole_range_of_u_is_covered_without_gaps():
    kept, weights = np.array([3, 5, 9]), np.array([0.25, 0.5, 0.25])

    assert [draw(kept, weights, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [3, 3, 5, 5, 9, 9]


def test_a_wrong_distribution_would_be_noticed():
    """The yardstick itself: draws at temperature 1 do not pass for temperature 1.05."""
    params = SamplingParams()
    kept, weights = candidates(adjust(LOGITS.astype(np.float64), make_row(params)), params)
    observed = {}
    for u in uniforms(seed=1000):
        token = draw(kept, weights, u)
        observed[token] = observed.get(token, 0) + 1

    assert deviations(observed, expected_distribution(SamplingParams(temperature=1.05))) > 4
