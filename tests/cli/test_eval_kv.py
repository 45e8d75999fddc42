"""`octavo eval kv` on the command line: what it refuses before it reads for minutes."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("budget", ["nan", "inf"])
def test_a_budget_that_is_no_number_is_refused(octavo, budget):
    ran = octavo("eval", "kv", "no-such-model", "--budget-kl", budget)
    assert ran.code == 2
    assert "--budget-kl" in ran.err


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_read(octavo, tmp_path):
    ran = octavo("eval", "kv", "no-such-model", "--report", str(tmp_path / "absent" / "kv.html"))
    assert ran.code == 1
    assert "absent" in ran.err
    assert "no-such-model" not in ran.err


def test_a_report_that_is_a_folder_is_refused_before_anything_is_read(octavo, tmp_path):
    (tmp_path / "kv.html").mkdir()
    ran = octavo("eval", "kv", "no-such-model", "--report", str(tmp_path / "kv.html"))
    assert ran.code == 1
    assert "it is a folder" in ran.err
