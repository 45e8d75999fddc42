"""A request: what it knows, what it has computed, when it ends, and which changes of state are legal."""

import pytest

from octavo.core.content import TokenContent
from octavo.core.request import RequestStatus
from octavo.testing.factories import make_request

LEGAL = {
    ("forking", "running"),
    ("forking", "waiting"),
    ("forking", "finished"),
    ("waiting", "running"),
    ("waiting", "finished"),
    ("running", "waiting"),
    ("running", "finished"),
}


@pytest.mark.parametrize("before", RequestStatus)
@pytest.mark.parametrize("after", RequestStatus)
def test_only_legal_transitions_are_possible(before, after):
    request = make_request(3)
    request.status = before
    if (before.value, after.value) in LEGAL:
        request.set_status(after)
        assert request.status is after
    else:
        with pytest.raises(AssertionError, match=f"cannot become {after.value}"):
            request.set_status(after)


def test_known_is_prompt_and_output():
    request = make_request([7, 8, 9], max_tokens=4)
    request.max_total_tokens = 7
    request.append(5)
    request.num_computed_tokens = 3

    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_known_tokens) == (3, 1, 4)
    assert request.num_uncomputed_tokens == 1
    assert list(request.prompt_token_ids()) == [7, 8, 9]
    assert list(request.output_token_ids()) == [5]
    assert repr(request) == "Request('request', waiting, 3 of 4 tokens computed)"


EOS, STOP = 11, 12


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({}, [EOS], "stop"),
        ({"ignore_eos": True}, [EOS], None),
        ({"stop_token_ids": (STOP,)}, [STOP], "stop"),
        ({"stop_token_ids": (STOP,), "ignore_eos": True}, [STOP], "stop"),
        ({"min_tokens": 2}, [EOS], None),
        ({"min_tokens": 2}, [1, EOS], "stop"),
        ({"min_tokens": 2, "stop_token_ids": (STOP,)}, [STOP], None),
        ({"max_tokens": 2}, [1, 1], "length"),
        ({"max_tokens": 2}, [1, EOS], "stop"),
        ({"max_tokens": 2}, [1], None),
        ({"max_tokens": 1, "min_tokens": 1}, [1], "length"),
    ],
)
def test_token_ends_a_request_for_the_right_reason(params, tokens, expected):
    """A stop in the last allowed token is a stop: the text is complete."""
    request = make_request(3, eos_token_ids=(10, EOS), **params)
    request.max_total_tokens = 3 + request.params.max_tokens
    *early, last = [request.append(token) for token in tokens]

    assert early == [None] * (len(tokens) - 1)
    assert last == expected


@pytest.mark.parametrize(
    ("min_tokens", "num_output", "expected"),
    [(0, 0, ()), (2, 0, (10, EOS, STOP)), (2, 1, (10, EOS, STOP)), (2, 2, ())],
)
def test_ids_that_would_end_it_are_banned_before_min_tokens(min_tokens, num_output, expected):
    """Each id once, also one that is both; also under `ignore_eos`, where it only must not come."""
    request = make_request(3, eos_token_ids=(10, EOS), stop_token_ids=(STOP, EOS), min_tokens=min_tokens)
    request.max_total_tokens = 100
    for _ in range(num_output):
        request.append(1)

    assert request.banned_token_ids == expected


def test_scoring_request_does_not_read_the_cache():
    assert make_request(3).reads_prefix_cache
    assert not make_request(3, prompt_logprobs=0).reads_prefix_cache


def test_content_identifies_a_range_of_its_tokens():
    content, other = TokenContent([1, 2, 3, 4]), TokenContent([9, 2, 3, 9])

    assert content.identity(1, 3) == other.identity(1, 3)
    assert content.identity(0, 3) != other.identity(0, 3)
    assert len(content.identity(0, 4)) == 16
    content.append(5)
    assert len(content) == 5
    assert list(content.token_ids(3, 5)) == [4, 5]
