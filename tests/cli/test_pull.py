"""`octavo pull`: the path on stdout, everything else on stderr."""

from __future__ import annotations

import json

import pytest

from octavo.models import fetch
from octavo.models.fetch import FetchedModel


@pytest.fixture
def arrives(monkeypatch, tmp_path):
    """Fetching that reports two stages and lands in a folder of two files."""
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_bytes(b"{}")

    def fetched(model, *, progress, is_rechecked):
        assert is_rechecked
        progress("downloading", 0, 2**20)
        progress("downloading", 2**20, 2**20)
        progress("unpacking", 5, None)
        return FetchedModel(model=model, path=tmp_path, is_new=True)

    monkeypatch.setattr(fetch, "fetch", fetched)
    return tmp_path


def test_path_is_all_that_goes_to_stdout(octavo, arrives):
    ran = octavo("pull", "org/name")

    assert ran.code == 0
    assert ran.out == f"{arrives}\n"
    assert ran.err.splitlines() == ["downloading 1.0 MiB", "unpacking"]


def test_quiet_says_nothing_else(octavo, arrives):
    assert octavo("pull", "org/name", "-q").err == ""


def test_json_is_one_document(octavo, arrives):
    document = json.loads(octavo("pull", "org/name", "--json").out)

    assert document == {
        "schema": "octavo.pull/1",
        "model": "org/name",
        "path": str(arrives),
        "size_bytes": 7,
        "is_new": True,
    }
