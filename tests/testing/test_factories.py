"""The rig itself: it must notice when work does not come to an end, and fit the seams it stands for."""

import inspect

import pytest

from octavo.core.ports import Clock, Runner
from octavo.testing.factories import CoreSetup, Rig
from octavo.testing.fake_runner import FakeRunner


def test_rig_notices_work_that_does_not_end():
    rig = Rig()
    rig.add(4, max_tokens=50)
    with pytest.raises(AssertionError, match="1 requests are unfinished after 10 steps"):
        rig.run_to_end(max_steps=10)


def test_rig_of_the_reserved_allocator_has_no_paged_one():
    with pytest.raises(AssertionError):
        assert Rig(CoreSetup(allocator="reserved", max_model_len=16)).paged


def test_fake_runner_has_what_a_runner_has():
    names = [name for name, _ in inspect.getmembers(Runner, inspect.isfunction) if not name.startswith("_")]

    assert names == ["collect", "execute", "submit"]
    assert all(
        inspect.signature(getattr(FakeRunner, name)) == inspect.signature(getattr(Runner, name)) for name in names
    )
    assert hasattr(Clock, "now_s")
