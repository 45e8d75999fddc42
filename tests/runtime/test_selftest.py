"""The self-test passes here, and would not if a kernel were wrong."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.runtime import selftest
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.selftest import run_checks


def test_every_check_passes_on_this_machine() -> None:
    checks = list(run_checks())

    assert len(checks) >= 14
    assert [check for check in checks if not check.is_passed] == []


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one_bit(*args, **options):
        return np.nextafter(right(*args, **options), np.float32(np.inf))

    right = selftest.linear
    monkeypatch.setattr(selftest, "linear", off_by_one_bit)

    products = [check for check in run_checks(seed=1) if check.name.startswith("product")]
    assert products and not any(check.is_passed for check in products)


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that computes another token's row, as a wrong slot would make it."""

    class Wrong(NativeRunner):
        def execute(self, plan):
            plan.token_ids[0] = (plan.token_ids[0] + 1) % 331
            return super().execute(plan)

    monkeypatch.setattr(selftest, "NativeRunner", Wrong)

    steps = [check for check in run_checks(seed=1) if check.name.startswith("whole steps")]
    assert len(steps) == 6 and not any(check.is_passed for check in steps)
