"""Rates over the last minute."""

from __future__ import annotations

from octavo.engine.rates import RateWindow


def test_a_rate_is_over_the_time_since_the_start_and_then_over_a_minute() -> None:
    window = RateWindow(now_s=100.0)
    window.add(100.5, 3)
    window.add(103.9, 7)

    assert window.per_s(100.5) == 10.0, "less than a second counts as one"
    assert window.per_s(110.0) == 1.0
    assert window.per_s(159.0) == 10 / 59
    assert window.per_s(161.0) == 7 / 60, "the first second is out of sight"
    assert window.total(162.0) == 7
    assert window.total(163.0) == 0
    assert window.per_s(10_000.0) == 0


def test_a_window_that_was_left_alone_for_long_has_forgotten() -> None:
    window = RateWindow(now_s=0.0, window_s=10)
    for second in range(25):
        window.add(float(second))

    assert window.total(24.0) == 10
    window.add(1_000_000.0)
    assert window.total(1_000_000.0) == 1


def test_a_time_before_the_last_one_counts_as_the_last_one() -> None:
    window = RateWindow(now_s=50.0)
    window.add(60.0)
    window.add(55.0)

    assert window.total(60.0) == 2
    assert window.total(119.5) == 2 and window.total(120.0) == 0
