"""The sampler on scripted logits: exact numbers of every adjustment, extremes, log-probabilities."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.core.step import SampleRow
from octavo.errors import ModelNumbersError
from octavo.runtime.sampler import adjust, candidates, sample, token_logprobs

NOTHING = np.float32(-np.inf)


def logits_of(*values):
    return np.array(values, np.float32)


def make_row(params, *, seed=0, position=10, banned=(), prompt=(), output=(), allowed=None, request_id="r"):
    return SampleRow(
        request_id=request_id,
        logits_row=0,
        position=position,
        params=params,
        seed=seed,
        banned_token_ids=tuple(banned),
        prompt_token_ids=array("i", prompt),
        output_token_ids=array("i", output),
        allowed_tokens=None if allowed is None else sum(1 << one for one in allowed).to_bytes(4, "little"),
    )


def chosen(logits, row):
    return sample(logits, row).token_id


def adjusted(logits, **row):
    params = SamplingParams(**{name: row.pop(name) for name in list(row) if hasattr(SamplingParams, name)})
    return adjust(logits.astype(np.float64), make_row(params, **row)).tolist()


def kept_ids(logits, **params):
    return candidates(logits.astype(np.float64), SamplingParams(**params))[0].tolist()


# --- greedy -----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_equals():
    greedy = SamplingParams(temperature=0.0)

    assert chosen(logits_of(1, 5, 2, 5, 5), make_row(greedy)) == 1


def test_greedy_sees_bias_bans_and_penalties():
    greedy = SamplingParams(temperature=0.0, logit_bias={3: 2.0}, repetition_penalty=2.0)
    row = make_row(greedy, banned=(0,), prompt=(1,))

    assert chosen(logits_of(9, 8, 5, 4), row) == 3  # 9 is banned, 8 becomes 4, 5 stays, 4 becomes 6


def test_greedy_beside_masked_tokens_stays_finite():
    """A greedy row is not scaled by a made-up temperature, which would turn -inf into +inf or NaN."""
    greedy = SamplingParams(temperature=0.0, logprobs=1)

    assert chosen(np.array([-3, NOTHING, -1, NOTHING], np.float32), make_row(greedy, banned=(0,))) == 2


# --- exact numbers ----------------------------------------------------------------------------------------------------


def test_bias_is_added_to_the_logit():
    assert adjusted(logits_of(1, 2, 3), logit_bias={0: 100.0, 2: -0.5}) == [101.0, 2.0, 2.5]


def test_a_token_that_is_not_allowed_is_removed_before_anything_is_added():
    row = {"allowed": (1, 3), "logit_bias": {0: 100.0, 1: 2.0}, "presence_penalty": -2.0, "output": (2, 3)}

    assert adjusted(logits_of(9, 1, 9, 4), **row) == [-math.inf, 3.0, -math.inf, 6.0]


def test_what_is_not_allowed_changes_nothing_among_what_is():
    params = SamplingParams(temperature=0.7, top_p=0.8, top_k=2)
    hidden = [sample(logits_of(NOTHING, 1, NOTHING, 2, 1.5), make_row(params, position=p)) for p in range(50)]
    masked = [sample(logits_of(7, 1, 8, 2, 1.5), make_row(params, position=p, allowed=(1, 3, 4))) for p in range(50)]

    assert hidden == masked and len({one.token_id for one in masked}) == 2


def test_log_probabilities_are_of_the_model_whatever_is_allowed():
    params = SamplingParams(temperature=0.0, logprobs=2)
    free, held = (sample(logits_of(1, 5, 3), make_row(params, allowed=allowed)) for allowed in (None, (0,)))

    assert held.token_id == 0 and held.logprobs.rank == 3 and math.isfinite(held.logprobs.logprob)
    assert held.logprobs.top == free.logprobs.top


def test_a_mask_of_a_wrong_length_is_our_bug():
    with pytest.raises(AssertionError, match="one bit per id"):
        sample(np.zeros(33, np.float32), make_row(SamplingParams(), allowed=(1,)))


def test_a_banned_token_has_no_weight_whatever_its_bias():
    assert adjusted(logits_of(1, 2), logit_bias={0: 100.0}, banned=(0,)) == [-math.inf, 2.0]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    numbers = adjusted(logits_of(3, -3, 0, 3, -3), repetition_penalty=1.5, prompt=(0, 1, 2), output=(0, 0))

    assert numbers == [2.0, -4.5, 0.0, 3.0, -3.0]  # once per token, however often it was seen


def test_presence_penalty_counts_the_output_alone_and_once():
    assert adjusted(logits_of(3, 3, 3), presence_penalty=0.75, prompt=(0,), output=(1, 1, 1)) == [3.0, 2.25, 3.0]


def test_frequency_penalty_counts_every_occurrence_in_the_output():
    assert adjusted(logits_of(3, 3, 3), frequency_penalty=0.5, prompt=(0, 2), output=(1, 1, 2)) == [3.0, 2.0, 2.5]


def test_negative_penalties_encourage():
    numbers = adjusted(logits_of(3, 3), presence_penalty=-1.0, frequency_penalty=-0.5, output=(0, 0))

    assert numbers == [5.0, 3.0]


def test_penalties_come_after_bias_and_repetition_before_the_others():
    numbers = adjusted(
        logits_of(1, 1),
        logit_bias={0: 3.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        output=(0, 0),
    )

    assert numbers == [(1 + 3) / 2 - 2 * 0.25 - 0.5, 1.0]


def test_adjusting_leaves_the_logits_alone():
    logits = np.array([1.0, 2.0])

    adjust(logits, make_row(SamplingParams(logit_bias={0: 5.0}), banned=(1,)))

    assert logits.tolist() == [1.0, 2.0]


# --- which tokens may be drawn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, -1, 5, 6, 10_000])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k):
    assert kept_ids(logits_of(1, 2, 3, 4, 5), top_k=top_k) == [0, 1, 2, 3, 4]


def test_top_k_cuts_through_ties_by_id():
    assert kept_ids(logits_of(1, 7, 3, 3, 3, 0), top_k=3) == [1, 2, 3]


@pytest.mark.parametrize("top_p", [1e-9, 0.0])
def test_the_smallest_top_p_keeps_the_likeliest_token(top_p):
    assert kept_ids(logits_of(1, 2, 2, 0), top_p=top_p) == [1]


def test_top_p_keeps_up_to_the_token_that_reaches_it():
    half_quarter_quarter = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)

    assert kept_ids(half_quarter_quarter, top_p=0.49) == [0]
    assert kept_ids(half_quarter_quarter, top_p=0.51) == [0, 1]
    assert kept_ids(half_quarter_quarter, top_p=0.76) == [0, 1, 2]
    assert kept_ids(half_quarter_quarter, top_p=0.99) == [0, 1, 2, 3]
    assert kept_ids(logits_of(1, 1, 1, 1), top_p=0.5) == [0, 1]  # reached exactly, ties by id


def test_top_p_is_a_share_of_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 the top two make 4/7 and 3/7: 0.5 is reached by the first, though 0.4 < 0.5."""
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)

    assert kept_ids(logits, top_p=0.5) == [0, 1]
    assert kept_ids(logits, top_p=0.5, top_k=2) == [0]


def test_top_k_of_one_with_top_p_keeps_one():
    assert kept_ids(logits_of(1, 3, 2), top_k=1, top_p=0.8) == [1]


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest():
    logits = np.log([0.5, 0.26, 0.24]).astype(np.float32)

    assert kept_ids(logits, min_p=0.5) == [0, 1]
    assert kept_ids(logits, min_p=1.0) == [0]
    assert kept_ids(logits_of(4, 1, 4), min_p=1.0) == [0, 2]


def test_min_p_is_taken_after_temperature():
    logits = np.log([0.8, 0.2]).astype(np.float32)

    assert kept_ids(logits, min_p=0.3) == [0]
    assert kept_ids(logits, min_p=0.3, temperature=2.0) == [0, 1]  # sqrt(0.25) = 0.5


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-6, 1e-8, 1e-30, 5e-324])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.5}])
def test_a_tiny_temperature_equals_greedy(temperature, others):
    params = SamplingParams(temperature=temperature, **others)
    for seed in range(50):
        logits = np.random.default_rng(seed).standard_normal(300).astype(np.float32) * 20

        assert chosen(logits, make_row(params, seed=seed)) == int(np.argmax(logits))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 100.0},
        {"top_k": 1, "top_p": 0.8},
        {"top_p": 0.0, "min_p": 1.0, "top_k": 1},
        {"min_p": 1.0, "top_p": 1e-9},
        {"temperature": 1e-8, "min_p": 1.0, "top_p": 0.0},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0},
    ],
)
@pytest.mark.parametrize("logits", [[0.0] * 7, [-1e30, 3e38, -3e38, 0.0], [5.0], [-80.0, -80.0, NOTHING]])
def test_one_token_at_least_may_always_be_drawn(params, logits):
    row = make_row(SamplingParams(logprobs=2, **params), output=(0,))
    answer = sample(np.array(logits, np.float32), row)

    assert 0 <= answer.token_id < len(logits)
    assert logits[answer.token_id] > NOTHING


def test_a_masked_token_is_never_drawn():
    params = SamplingParams(temperature=100.0)
    drawn = {chosen(logits_of(1, 1, 1, 1), make_row(params, seed=seed, banned=(1, 3))) for seed in range(200)}

    assert drawn == {0, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_name_the_request(bad):
    row = make_row(SamplingParams(), request_id="chat-17")
    with pytest.raises(ModelNumbersError, match=r"request chat-17: choosing the token at position 10.* is (nan|inf)"):
        sample(np.array([0.0, bad, 1.0], np.float32), row)


def test_logits_that_rule_out_everything_name_the_request():
    with pytest.raises(AssertionError, match="request r: every token is banned"):
        sample(logits_of(1, 2), make_row(SamplingParams(temperature=0.0), banned=(0, 1)))


@pytest.mark.parametrize("row", [{"banned": (4,)}, {"output": (4,)}, {"prompt": (-1,)}])
def test_an_id_outside_the_vocabulary_is_a_bug(row):
    with pytest.raises(AssertionError, match="not in the vocabulary"):
        sample(logits_of(1, 2, 3, 4), make_row(SamplingParams(presence_penalty=1.0), **row))


# --- draws ------------------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    params = SamplingParams()
    draws = [chosen(logits, make_row(params, seed=3, position=p)) for p in range(40)]

    assert draws == [chosen(logits, make_row(params, seed=3, position=p, request_id="other")) for p in range(40)]
    assert draws != [chosen(logits, make_row(params, seed=4, position=p)) for p in range(40)]
    assert len(set(draws)) > 20


def test_a_filter_that_keeps_all_changes_no_draw():
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    plain = [chosen(logits, make_row(SamplingParams(), seed=seed)) for seed in range(100)]

    for params in ({"top_k": 100}, {"top_k": -1}, {"min_p": 1e-300}, {"repetition_penalty": 1.0}):
        assert plain == [chosen(logits, make_row(SamplingParams(**params), seed=seed)) for seed in range(100)]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_before_any_adjustment():
    logits = np.random.default_rng(1).standard_normal(200).astype(np.float32) * 5
    exact = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    row = make_row(
        SamplingParams(temperature=0.5, top_k=3, logprobs=5, logit_bias={7: 50.0}, presence_penalty=2.0), output=(7,)
    )

    answer = sample(logits, row)

    assert answer.token_id == 7
    assert answer.logprobs.logprob == pytest.approx(exact[7], rel=1e-13)
    assert [token for token, _ in answer.logprobs.top] == np.argsort(-logits, kind="stable")[:5].tolist()
    assert [value for _, value in answer.logprobs.top] == pytest.approx(sorted(exact)[:-6:-1], rel=1e-13)


def test_no_logprobs_unless_asked_for():
    assert sample(logits_of(1, 2), make_row(SamplingParams())).logprobs is None


def test_zero_logprobs_reports_the_chosen_token_alone():
    logprobs = sample(logits_of(1, 2), make_row(SamplingParams(temperature=0.0, logprobs=0))).logprobs

    assert (logprobs.token_id, logprobs.rank, logprobs.top) == (1, 1, ())


def test_ranks_follow_the_canonical_order():
    logits = logits_of(2, 9, 2, 5, 9)
    order = [1, 4, 3, 0, 2]

    assert [token_logprobs(logits, token, 0).rank for token in order] == [1, 2, 3, 4, 5]
    assert [token for token, _ in token_logprobs(logits, 0, 5).top] == order
    assert [token for token, _ in token_logprobs(logits, 0, 4).top] == order[:4]


def test_more_top_tokens_than_the_vocabulary_gives_all():
    assert len(token_logprobs(logits_of(1, 2, 3), 0, 20).top) == 3


def test_probabilities_of_all_tokens_sum_to_one():
    logits = np.random.default_rng(5).standard_normal(1000).astype(np.float32) * 10

    assert sum(math.exp(value) for _, value in token_logprobs(logits, 0, 1000).top) == pytest.approx(1.0, abs=1e-12)


def test_a_token_the_model_rules_out_has_minus_infinity():
    logprobs = token_logprobs(np.array([0.0, NOTHING], np.float32), 1, 2)

    assert (logprobs.logprob, logprobs.rank) == (-math.inf, 2)
    assert logprobs.top == ((0, 0.0), (1, -math.inf))
