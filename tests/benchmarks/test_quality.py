"""The quality benchmark: nothing lost where nothing is rounded, something where something is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("benchmark_quality", BENCHMARKS / "quality.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_gguf_model(TinyModel(), tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind="q4_1"))


@pytest.fixture
def measure(quality, path, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the moon " * 40)

    def call(*args):
        quality.main([path, "--text", str(text), "--window", "300", "--tokens", "600", "--json", *args])
        return json.loads(capsys.readouterr().out)

    return call


def test_what_is_held_exactly_loses_nothing_and_what_is_rounded_does(measure):
    document = measure("--held", "f32/f32", "--held", "stored/f16", "--held", "f32/bf16")

    exact, default, cache = document["compared"]
    assert document["schema"] == "octavo.quality/1"
    assert document["num_positions"] == 600
    assert exact["kl_max_nats"] == 0.0
    assert exact["top1_agreement_ratio"] == 1.0
    assert exact["perplexity"] == exact["exact_perplexity"]
    assert 0 < cache["kl_mean_nats"] < default["kl_mean_nats"] < 0.1
    assert default["kl_median_nats"] <= default["kl_p99_nats"] <= default["kl_max_nats"]


def test_parts_add_up_to_about_the_whole(measure):
    *parts, whole = measure("--parts")["compared"]

    assert whole["held"] == "all"
    assert all(0 < part["kl_mean_nats"] < whole["kl_mean_nats"] for part in parts)
    assert sum(part["kl_mean_nats"] for part in parts) == pytest.approx(whole["kl_mean_nats"], rel=0.5)


def test_figures_are_those_of_the_definition(quality):
    exact = np.log(np.array([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]]))
    found = np.log(np.array([[0.4, 0.5, 0.1], [0.2, 0.2, 0.6]]))
    comparison = quality.Comparison("x")

    comparison.add(exact, found, [2])

    figures = comparison.as_dict([np.log(10)])
    first = 0.5 * np.log(0.5 / 0.4) + 0.4 * np.log(0.4 / 0.5)
    assert figures["kl_mean_nats"] == pytest.approx(first / 2)
    assert figures["kl_max_nats"] == pytest.approx(first)
    assert figures["top1_agreement_ratio"] == 0.5
    assert figures["flip_gap_median_nats"] == pytest.approx(np.log(0.5 / 0.4))
    assert figures["perplexity"] == pytest.approx(10)


def test_text_that_ships_is_the_one_named():
    import hashlib

    digest = hashlib.sha256((BENCHMARKS / "data" / "austen.txt").read_bytes()).hexdigest()

    assert digest in (BENCHMARKS / "data" / "README.md").read_text()
