"""Settings of all tests."""

from __future__ import annotations

import os
import secrets
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# What gates a change draws the same numbers each time; OCTAVO_CAMPAIGN=1 draws new ones.
IS_CAMPAIGN = "OCTAVO_CAMPAIGN" in os.environ

# How fast a machine is, is no property of the code: a shared one must not fail a test by being busy.
settings.register_profile(
    "octavo",
    deadline=None,
    derandomize=not IS_CAMPAIGN,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("octavo")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator with a seed of the test's own."""
    seed = secrets.randbits(64) if IS_CAMPAIGN else zlib.crc32(request.node.nodeid.encode())
    print(f"seed {seed}")  # shown when a test fails
    return np.random.default_rng(seed)
