"""Estimates, and how their intervals combine."""

from __future__ import annotations

import pytest

from octavo.errors import InvalidParameterError
from octavo.planner.engine_version import EngineVersion, parse_version
from octavo.planner.estimate import around, exact, remainder, share


def test_exact_parts_leave_an_exact_rest():
    rest = remainder(exact(100, source="a"), exact(30, source="b"), exact(20, source="c"), source="rest")
    assert (rest.low_bytes, rest.value_bytes, rest.high_bytes) == (50, 50, 50)
    assert rest.is_exact and rest.source == "rest"


def test_a_part_that_may_be_larger_makes_the_rest_smaller():
    rest = remainder(exact(1000, source="a"), around(300, below=10, above=100, source="b"), source="rest")
    assert (rest.low_bytes, rest.value_bytes, rest.high_bytes) == (600, 700, 710)


def test_independent_doubts_add_as_squares():
    part = around(100, below=30, above=30, source="b")
    other = around(100, below=40, above=40, source="c")
    rest = remainder(exact(1000, source="a"), part, other, source="rest")
    assert (rest.low_bytes, rest.value_bytes, rest.high_bytes) == (750, 800, 850)


def test_what_does_not_fit_leaves_less_than_nothing():
    rest = remainder(exact(10, source="a"), exact(30, source="b"), source="rest")
    assert rest.value_bytes == -20
    assert not rest.holds(0)


def test_an_estimate_does_not_fall_below_nothing():
    assert around(5, below=10, above=1, source="a").low_bytes == 0


def test_a_share_keeps_its_interval_in_proportion():
    half = share(around(1000, below=100, above=10, source="a"), 0.5)
    assert (half.low_bytes, half.value_bytes, half.high_bytes) == (450, 500, 505)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.17", (0, 17, 0)),
        ("v0.11.0", (0, 11, 0)),
        ("0.6.x", (0, 6, 0)),
        ("0.10.1.dev101", (0, 10, 1)),
        ("0.5.3.post1", (0, 5, 3)),
        ("0.14.0rc2", (0, 14, 0)),
        ("0.19.2rc1.dev8+g4b7f5ea1a", (0, 19, 2)),
        (" 1.2.3 ", (1, 2, 3)),
    ],
)
def test_releases_are_read_as_people_and_logs_write_them(text, version):
    assert parse_version(text) == EngineVersion(*version)


def test_releases_are_ordered_by_number_and_not_by_letter():
    assert parse_version("0.9") < parse_version("0.10") < parse_version("0.10.1") < parse_version("1.0")


@pytest.mark.parametrize("text", ["", "latest", "17", "v", "2026-08", "0.17 or so", "nightly", "0..1", "-0.1"])
def test_what_is_no_release_number_is_refused(text):
    with pytest.raises(InvalidParameterError, match="release number"):
        parse_version(text)
