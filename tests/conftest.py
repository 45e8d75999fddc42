"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# How fast a machine is, is no property of the code: a shared one must not fail a test by being busy.
# What gates a change draws the same examples each time; OCTAVO_CAMPAIGN=1 draws new ones.
settings.register_profile(
    "octavo",
    deadline=None,
    derandomize="OCTAVO_CAMPAIGN" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("octavo")
