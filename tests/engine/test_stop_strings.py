from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.engine.stop_strings import StopMatcher, StopStrings

# Few letters, so that stop strings overlap, nest and begin all the time.
texts = st.text(alphabet="ab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=5)


def cut(text: str, stops: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    """Return the text before the stop string that starts first, found the slow way; of equal starts, the shorter."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, length, stop = min(found)
    return text[: start + length] if include_stop else text[:start], stop


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopStrings(stops), include_stop=include_stop)
    out = []
    for piece in pieces:
        released = matcher.feed(piece)
        out.append(released.text)
        if released.stopped_by is not None:
            return out, released.stopped_by
    released = matcher.finish()
    return [*out, released.text], released.stopped_by


@settings(max_examples=500)
@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(0, 100), max_size=12), include_stop=st.booleans())
@example(text="xabca", stops=["abcd", "bc"], cuts=[4], include_stop=False)
def test_text_is_cut_at_the_stop_that_starts_first_however_it_arrives(text, stops, cuts, include_stop):
    out, stopped_by = run(stops, pieces_of(text, cuts), include_stop=include_stop)

    assert ("".join(out), stopped_by) == cut(text, stops, include_stop=include_stop)


@given(text=texts, stops=stop_lists)
def test_exactly_the_longest_end_that_may_become_a_stop_is_held_back(text, stops):
    matcher = StopMatcher(StopStrings(stops), include_stop=False)
    fed = released = ""
    for character in text:
        answer = matcher.feed(character)
        if answer.stopped_by is not None:
            return
        fed, released = fed + character, released + answer.text
        found = cut(fed, stops)[0] if any(stop in fed for stop in stops) else None
        beginnings = (k for k in range(len(fed), 0, -1) if any(s.startswith(fed[-k:]) and s != fed[-k:] for s in stops))
        held = next(beginnings, 0)

        assert len(fed) - len(released) == held
        # A complete stop string is waited on only while one that starts earlier may still complete.
        assert found is None or len(released) < len(found)


@given(text=texts, stops=stop_lists, num_ignored=st.integers(0, 10))
def test_a_stop_that_completes_before_it_may_is_ignored(text, stops, num_ignored):
    matcher = StopMatcher(StopStrings(stops), include_stop=False)
    out, stopped_by = "", None
    for i, character in enumerate(text):
        released = matcher.feed(character, may_stop=i >= num_ignored)
        out, stopped_by = out + released.text, released.stopped_by
        if stopped_by is not None:
            break
    else:
        rest = matcher.finish()
        out, stopped_by = out + rest.text, rest.stopped_by

    ends = [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > num_ignored
    ]
    expected = min(ends, default=(len(text), 0, None))
    assert (out, stopped_by) == (text[: expected[0]], expected[2])


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        pytest.param(["END"], ["one", "E", "N", "D", "two"], ("one", "END"), id="across pieces"),
        pytest.param(["END"], ["oneENDtwo"], ("one", "END"), id="inside one piece"),
        pytest.param(["END"], ["one", "E", "N"], ("oneEN", None), id="never completed, delivered at the end"),
        pytest.param(["\n\nUser"], ["a\n", "\n", "\nUser:"], ("a\n", "\n\nUser"), id="restarts inside its beginning"),
        pytest.param(["abcd", "bc"], ["ab", "c", "d"], ("", "abcd"), id="the outer one of two nested starts first"),
        pytest.param(["abcd", "bc"], ["ab", "c", "x"], ("a", "bc"), id="the inner one, once the outer one fails"),
        pytest.param(["abcd", "bc"], ["ab", "c"], ("a", "bc"), id="the inner one, at the end of the answer"),
        pytest.param(["never", "bc"], ["ab", "cd"], ("a", "bc"), id="a second stop does not disable the first"),
        pytest.param(["aab"], ["aa", "a", "b"], ("a", "aab"), id="overlaps itself"),
        pytest.param(["é"], ["caf", "é"], ("caf", "é"), id="not ASCII"),
    ],
)
def test_known_cases(stops, pieces, expected):
    out, stopped_by = run(stops, pieces)

    assert ("".join(out), stopped_by) == expected


def test_an_ignored_stop_goes_out_at_once_but_for_what_may_start_another():
    matcher = StopMatcher(StopStrings(["ab", "bcd"]), include_stop=False)

    assert matcher.feed("xab", may_stop=False).text == "xa"
    assert matcher.feed("cd").stopped_by == "bcd"

    matcher = StopMatcher(StopStrings(["ab"]), include_stop=False)
    assert matcher.feed("xab", may_stop=False).text == "xab"


def test_a_text_without_beginnings_passes_at_once():
    matcher = StopMatcher(StopStrings(["###"]), include_stop=False)

    assert matcher.feed("all of it").text == "all of it"


def test_a_long_run_of_beginnings_is_held_back_and_delivered():
    matcher = StopMatcher(StopStrings(["a" * 500 + "b"]), include_stop=False)
    released = "".join(matcher.feed("aaaa").text for _ in range(1000))

    assert len(released) == 4000 - 500
    assert released + matcher.finish().text == "a" * 4000
