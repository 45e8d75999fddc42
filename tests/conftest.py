"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast a machine is, is no property of the code: a shared one must not fail a test by being busy.
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("octavo")
