"""`octavo doctor`: what is there, what would be chosen, and where each value came from."""

from __future__ import annotations

import json

import pytest

from octavo.cli import doctor
from octavo.config.engine import OPTIONS
from octavo.config.machine import read_machine
from octavo.testing.tiny_models import TinyModel, write_hf_model


@pytest.fixture
def folder(tmp_path):
    """A model folder on this disk."""
    path = tmp_path / "tiny"
    write_hf_model(TinyModel(), path)
    return path


def test_report_shows_machine_and_plan(octavo, folder):
    ran = octavo("doctor", str(folder), "--threads", "1", "--num-blocks", "40")

    assert ran.code == 0
    assert "available" in ran.out
    assert "CPU quota" in ran.out
    assert "KV pool: 40 blocks of 16 tokens" in ran.out
    assert "= total" in ran.out


def test_json_carries_units_and_adds_up(octavo, folder):
    ran = octavo("doctor", str(folder), "--json", "--num-blocks", "40")

    document = json.loads(ran.out)
    assert document["schema"] == "octavo.doctor/1"
    assert document["machine"]["num_physical_cores"] == read_machine().num_physical_cores
    assert document["config"]["num_blocks"] == {"value": 40, "origin": "--num-blocks"}
    assert set(document["config"]) == {option.name for option in OPTIONS}
    plan = document["plan"]
    assert plan["num_blocks"] == 40
    assert sum(plan["memory"].values()) == plan["total_bytes"]
    assert document["refusal"] is None


def test_what_does_not_fit_is_reported_with_exit_code_3(octavo, folder):
    ran = octavo("doctor", str(folder), "--json", "--num-blocks", "1", "--max-model-len", "64")

    document = json.loads(ran.out)
    assert ran.code == 3
    assert document["plan"] is None
    assert document["refusal"]["code"] == "does-not-fit"
    assert any("--max-model-len 16" in hint for hint in document["refusal"]["hints"])

    ran = octavo("doctor", str(folder), "--num-blocks", "1", "--max-model-len", "64")
    assert ran.code == 3
    assert "error[does-not-fit]" in ran.err
    assert "cores" in ran.out


def test_config_shows_each_value_and_its_origin(octavo, monkeypatch):
    monkeypatch.setenv("OCTAVO_SEED", "7")
    monkeypatch.setenv("OCTAVO_SERVICE_HOST", "10.0.0.1")

    ran = octavo("doctor", "--config", "--kv-cache-memory", "1GiB")

    rows = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines()}
    assert rows["seed"] == ["7", "OCTAVO_SEED"]
    assert rows["kv_cache_memory"] == ["1.0", "GiB", "--kv-cache-memory"]
    assert rows["max_model_len"][:3] == ["auto", "default", "="]
    assert set(rows) == {option.name for option in OPTIONS}
    assert "OCTAVO_SERVICE_HOST" in ran.err


def test_model_that_is_not_here_is_not_fetched(octavo, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "empty"))

    ran = octavo("doctor")

    assert ran.code == 0
    assert "octavo pull smollm2-135m" in ran.out
    assert not (tmp_path / "empty").exists()


def test_missing_native_module_is_told_with_the_reason(octavo, monkeypatch):
    monkeypatch.setattr(
        doctor, "_native_facts", lambda: {"is_available": False, "because": "not built", "kernels": None}
    )

    assert "NumPy reference (not built)" in octavo("doctor", "nowhere/none").out


def test_works_without_home_and_writes_nothing(octavo_process):
    ran = octavo_process("doctor", "--json")

    document = json.loads(ran.out)
    assert ran.code == 0
    assert document["cache"]["folder"] is None
    assert "HOME" in document["cache"]["because"]
