"""SamplingParams: every field is checked when it is made, and the error names it."""

import math

import pytest

from octavo.core.sampling import MAX_SEED, SamplingParams
from octavo.errors import InvalidParameterError

GOOD = [
    {"n": 256},
    {"temperature": 0},
    {"temperature": 1e-8},
    {"top_p": 0.0},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 0},
    {"min_p": 1.0},
    {"seed": -MAX_SEED - 1},
    {"seed": MAX_SEED},
    {"repetition_penalty": 0.01},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2},
    {"logit_bias": {0: 100, 7: -100.0}},
    {"min_tokens": 3, "max_tokens": 3},
    {"min_tokens": 3},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"stop": ["a"] * 64},
    {"stop": ()},
    {"stop_token_ids": [0]},
    {"logprobs": 0},
    {"prompt_logprobs": 1024},
]
BAD = [
    ("n", {"n": 0}),
    ("n", {"n": 257}),
    ("n", {"n": True}),
    ("n", {"n": 1.0}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": "1"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": None}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 2**31}),
    ("min_p", {"min_p": -0.1}),
    ("seed", {"seed": MAX_SEED + 1}),
    ("seed", {"seed": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": -1.0}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias", {"logit_bias": {"1": 0.0}}),
    ("logit_bias", {"logit_bias": {-1: 0.0}}),
    ("logit_bias", {"logit_bias": {True: 0.0}}),
    ("logit_bias", {"logit_bias": {1: 100.5}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {1: True}}),
    ("logit_bias", {"logit_bias": {1: "0"}}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": 7}),
    ("stop", {"stop": ["a"] * 65}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [True]}),
    ("stop_token_ids", {"stop_token_ids": 7}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("skip_special_tokens", {"skip_special_tokens": None}),
    ("include_stop_str_in_output", {"include_stop_str_in_output": "yes"}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 1025}),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_allowed_values_are_kept(fields):
    params = SamplingParams(**fields)

    for name, value in fields.items():
        kept = getattr(params, name)
        assert kept == (tuple(value) if name in ("stop", "stop_token_ids") else value)


@pytest.mark.parametrize(("name", "fields"), BAD, ids=str)
def test_bad_value_is_refused_by_name(name, fields):
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**fields)

    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name}: ")


def test_none_is_how_others_spell_nothing():
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)


def test_params_are_hashable_and_equal_by_value():
    first, second = (SamplingParams(stop=["a"], stop_token_ids=[3], logit_bias={1: 2.0}) for _ in range(2))

    assert first == second
    assert hash(first) == hash(second)


def test_greedy_and_penalties_are_told():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
    assert not SamplingParams().has_penalties
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert SamplingParams(**{name: value}).has_penalties
