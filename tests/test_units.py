"""How sizes and counts are written."""

from __future__ import annotations

import pytest

from octavo.units import format_concurrency


@pytest.mark.parametrize(
    ("requests", "text"),
    [(22.7599, "22.75"), (44.129, "44.12"), (32.0, "32.00"), (0.0, "0.00"), (1234.567, "1,234.56"), (4.1 * 3, "12.30")],
)
def test_concurrency_never_promises_more_than_fits(requests, text):
    assert format_concurrency(requests) == text
