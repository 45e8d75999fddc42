"""At the door: what can never fit is refused on arrival, with the number that would fit, and that number is right."""

import pytest

from octavo.core.events import RequestArrived, RequestFinished, RequestRejected, StepScheduled
from octavo.core.kv_cache import GroupSpec
from octavo.core.limits import Limits
from octavo.errors import InvalidParameterError, RequestTooLongError
from octavo.testing.factories import CoreSetup, Rig, make_request, solo_output

MODEL_LEN = 64


def outcome(rig, num_prompt, max_tokens):
    """Return the number of output tokens, or the error."""
    try:
        how = {"max_tokens": max_tokens, "prompt_logprobs": 0 if max_tokens == 0 else None}
        request = rig.add(num_prompt, **how)
    except (RequestTooLongError, InvalidParameterError) as error:
        assert not rig.scheduler.has_unfinished
        return type(error)
    rig.run_to_end()
    assert request.finish_reason == "length"
    assert (rig.output(request), "length") == solo_output(request, rig.setup)
    return request.num_output_tokens


REFUSED = RequestTooLongError
TABLE = {
    # prompt: absent   0        1        2        64
    1: (63, 0, 1, 2, REFUSED),
    62: (2, 0, 1, 2, REFUSED),
    63: (1, 0, 1, REFUSED, REFUSED),
    64: (REFUSED, 0, REFUSED, REFUSED, REFUSED),
    65: (REFUSED,) * 5,
    200: (REFUSED,) * 5,
}


@pytest.mark.parametrize("allocator", ["paged", "reserved"])
@pytest.mark.parametrize("num_prompt", TABLE)
def test_length_matrix(num_prompt, allocator):
    """A model length of 64 in a pool of just that: prompt + output up to 64 is served in full (OPN-23)."""
    setup = CoreSetup(num_blocks=4, block_size=16, max_model_len=MODEL_LEN, allocator=allocator)

    outcomes = tuple(outcome(Rig(setup), num_prompt, max_tokens) for max_tokens in (None, 0, 1, 2, 64))

    assert outcomes == TABLE[num_prompt]


def test_empty_prompt_is_refused():
    rig = Rig()
    with pytest.raises(InvalidParameterError, match="no tokens"):
        rig.add([])
    assert not rig.scheduler.has_unfinished


def test_refusal_names_limit_and_prompt():
    rig = Rig(CoreSetup(max_model_len=MODEL_LEN))
    with pytest.raises(RequestTooLongError) as caught:
        rig.add(60, max_tokens=10)

    error = caught.value
    assert (error.num_prompt_tokens, error.max_tokens, error.longest_tokens) == (60, 10, 64)
    assert "60 tokens and 10 output tokens need 70 tokens, 64 is the most" in str(error)
    [event] = rig.of(RequestRejected)
    assert (event.num_prompt_tokens, event.longest_tokens) == (60, 64)
    assert not rig.of(RequestArrived)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "followed"),
    [(60, 10, (60, 4)), (200, 1, (63, 1)), (64, None, (63, None)), (65, 0, (64, 0)), (70, 30, (34, 30))],
)
def test_following_the_hint_works_and_one_more_does_not(num_prompt, max_tokens, followed):
    rig = Rig(CoreSetup(max_model_len=MODEL_LEN))
    with pytest.raises(RequestTooLongError) as caught:
        rig.add(num_prompt, max_tokens=max_tokens, prompt_logprobs=0)
    [hint] = caught.value.hints
    number = next(int(word) for word in hint.split() if word.isdigit())
    assert number == (followed[1] if "output" in hint else followed[0])

    assert outcome(rig, *followed) is not REFUSED
    more = (followed[0], followed[1] + 1) if "output" in hint else (followed[0] + 1, followed[1])
    assert outcome(rig, *more) is REFUSED


def test_no_hint_is_given_where_none_would_help():
    rig = Rig(CoreSetup(max_model_len=MODEL_LEN))
    with pytest.raises(RequestTooLongError) as caught:
        rig.add(70, max_tokens=64)

    assert caught.value.hints == ()


def test_limit_is_the_usable_pool_when_it_is_smaller():
    """12 blocks of 16 hold 192 tokens; the last output token needs no place, so 193 is the longest (OPN-02)."""
    rig = Rig(CoreSetup(num_blocks=12, block_size=16, max_model_len=512, max_num_seqs=4))
    assert rig.scheduler.longest_request_tokens == 193

    small = None
    for num_prompt, max_tokens, is_fitting in [(200, 1, False), (193, 1, False), (192, 1, True), (192, 2, False)]:
        assert (outcome(rig, num_prompt, max_tokens) is not REFUSED) == is_fitting
        small = rig.add(10)
        rig.run_to_end()
        assert small.finish_reason == "length"
    assert len(rig.of(RequestRejected)) == 3


def test_longest_request_fits_alone_and_uses_the_whole_pool():
    rig = Rig(CoreSetup(num_blocks=7, block_size=4, max_model_len=512))
    request = rig.add(3, max_tokens=None)
    rig.run_to_end()

    assert request.num_known_tokens == 29
    assert min(event.num_free_blocks for event in rig.of(StepScheduled)) == 0
    assert (rig.output(request), "length") == solo_output(request, rig.setup)


@pytest.mark.parametrize("num_blocks", range(2, 14))
@pytest.mark.parametrize("window", [None, 5, 9])
def test_longest_length_fits_and_one_more_does_not(num_blocks, window):
    """`longest_tokens` against the function it inverts, for a full and another group."""
    groups = (GroupSpec(), GroupSpec(window=window))
    kv = Rig(CoreSetup(num_blocks=num_blocks, groups=groups, max_num_seqs=1, max_num_batched_tokens=3)).paged

    longest = kv.longest_tokens
    assert kv.num_blocks(longest) <= num_blocks < kv.num_blocks(longest + 1)
    assert sorted(map(kv.num_blocks, range(80))) == list(map(kv.num_blocks, range(80)))


def test_pool_without_room_for_a_token_refuses_everything():
    """One block under two groups: nothing fits, and no hint pretends otherwise."""
    rig = Rig(CoreSetup(num_blocks=1, groups=(GroupSpec(), GroupSpec())))
    assert rig.paged.longest_tokens == 0
    with pytest.raises(RequestTooLongError) as caught:
        rig.add(1, max_tokens=1)

    assert caught.value.hints == ()


def test_reserved_pool_without_a_whole_run_refuses_everything():
    rig = Rig(CoreSetup(num_blocks=15, block_size=4, max_model_len=64, allocator="reserved"))
    with pytest.raises(RequestTooLongError):
        rig.add(1, max_tokens=1)


def test_id_in_use_is_refused_and_the_first_goes_on():
    rig = Rig()
    first = rig.add(4, "same")
    rig.step()
    with pytest.raises(InvalidParameterError, match="in use"):
        rig.add([9, 9], "same")
    rig.run_to_end()
    assert (rig.output(first), "length") == solo_output(first, rig.setup)

    second = rig.add([9, 9], "same")
    rig.run_to_end()
    assert (rig.output(second), "length") == solo_output(second, rig.setup)
    assert len(rig.of(RequestFinished)) == 2


def test_forks_of_a_refused_request_are_not_queued():
    rig = Rig(CoreSetup(max_model_len=8))
    with pytest.raises(RequestTooLongError):
        rig.scheduler.add(make_request(8, "lead"), [make_request(8, "fork")])

    assert not rig.scheduler.has_unfinished
    assert not rig.of(RequestArrived)


def test_budget_below_the_number_of_seats_is_refused():
    """Every running request must be able to decode in every step."""
    with pytest.raises(InvalidParameterError, match="max_num_batched_tokens") as caught:
        Limits(max_model_len=64, max_num_seqs=9, max_num_batched_tokens=8)
    assert "9" in caught.value.hints[0]

    Limits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=8)
