"""Lengths of requests: how they are asked, and what they hold on average."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidParameterError
from octavo.planner.lengths import LengthClass, Lengths, parse_lengths


def test_one_pair_and_several_with_weights_are_read():
    assert parse_lengths("1155:211").classes == (LengthClass(1155, 211),)
    several = parse_lengths("500:100x3, 8k:500")
    assert several.classes == (LengthClass(500, 100, 3), LengthClass(8192, 500))
    assert several.num_requests == 4
    assert several.mean_prompt_tokens == (3 * 500 + 8192) / 4
    assert several.quantile_tokens(0.5) == 600
    assert several.quantile_tokens(0.99) == 8692


@pytest.mark.parametrize("text", ["", "1155", "1155:", ":211", "0:5", "5:0", "a:b", "5:5x0", "1:2:3", "-5:5", "5:5,"])
def test_other_words_are_refused_with_an_example(text):
    with pytest.raises(InvalidParameterError) as caught:
        parse_lengths(text)
    assert "--lengths" in str(caught.value)


@given(
    classes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 4)), min_size=1, max_size=5),
    step=st.integers(2, 40),
)
def test_the_mean_is_the_plain_sum_over_all_steps_of_all_answers(classes, step):
    lengths = Lengths(classes=tuple(LengthClass(*each) for each in classes), source="drawn")

    def held(num_tokens: int) -> float:
        return min(ceil(num_tokens / step), 7) ** 2  # changes at multiples of the step only

    steps = [
        held(prompt + token)
        for prompt, output, weight in classes
        for token in range(1, output + 1)
        for _ in range(weight)
    ]
    assert lengths.mean_held(held, step=step) == pytest.approx(sum(steps) / len(steps))


def test_tokens_that_count_one_by_one_are_summed_exactly():
    lengths = parse_lengths("1155:211,3:200x2")
    steps = [1155 + token for token in range(1, 212)] + 2 * [3 + token for token in range(1, 201)]
    assert lengths.mean_held(float, step=1) == pytest.approx(sum(steps) / len(steps))


def test_made_up_lengths_cost_no_more_than_real_ones():
    calls = []

    def held(num_tokens: int) -> float:
        calls.append(num_tokens)
        return num_tokens / 16

    lengths = parse_lengths("1000000000:1000000000")
    assert lengths.mean_held(held, step=16) == pytest.approx(1.5e9 / 16, rel=1e-3)
    assert len(calls) < 200_000


def test_requests_beyond_a_limit_are_left_out():
    lengths = parse_lengths("100:10x9,1000:10")
    kept = lengths.up_to(500)
    assert kept is not None
    assert kept.num_requests == 9
    assert lengths.up_to(50) is None
