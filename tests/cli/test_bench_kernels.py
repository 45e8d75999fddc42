"""`octavo bench kernels`: the document, and a line per kernel."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("octavo.runtime._native", reason="the native module is not built")

from octavo.cli.bench_kernels import command
from octavo.cli.command import split_example
from octavo.runtime.linear_speed import MachineLimits
from octavo.testing.tiny_models import TinyModel, write_hf_model

LIMITS = MachineLimits(sgemm_flops=80e9, read_bytes_per_s=20e9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_hf_model(TinyModel(max_position=600), tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def known_limits(monkeypatch):
    """They have a test of their own, and take a while."""
    monkeypatch.setattr("octavo.runtime.machine_limits.limits_with_threads", lambda _threads: LIMITS)


def test_document_has_units_in_its_names_and_ratios_that_follow(octavo, model, known_limits):
    ran = octavo("bench", "kernels", model, "--threads", "1", "--json")

    document = json.loads(ran.out)
    assert ran.code == 0
    assert document["schema"] == "octavo.bench.kernels/1"
    assert document["threads"] == 1
    assert document["limits"] == {"matrix_product_gflop_per_s": 80.0, "memory_read_gb_per_s": 20.0}
    kernels = document["kernels"]
    assert len(kernels) == 5 * 5 + 3 + 4 + 2, "5 products, 3 batches within 600 tokens, 4 row-wise kernels, 2 samplings"
    for kernel in kernels:
        assert kernel["memory_read_limit_ratio"] == pytest.approx(kernel["gb_per_s"] / 20)
        if kernel["gflop_per_s"] is not None:
            assert kernel["matrix_product_limit_ratio"] == pytest.approx(kernel["gflop_per_s"] / 80)
    head = next(kernel for kernel in kernels if kernel["kernel"] == "product, head" and kernel["num_rows"] == 16)
    assert head["gflop_per_s"] * head["wall_s"] == pytest.approx(2 * 16 * 512 * 64 / 1e9)
    assert head["gb_per_s"] * head["wall_s"] == pytest.approx((512 * 64 + 16 * (512 + 64)) * 4 / 1e9)


def test_text_has_a_line_per_kernel_and_says_what_it_is_measuring(octavo, model, known_limits):
    ran = octavo("bench", "kernels", model, "--threads", "1")

    assert ran.code == 0
    assert ran.err.startswith("bench kernels: ")
    assert "float32 matrix product 80.0 GFLOP/s, memory read 20.0 GB/s" in ran.out
    lines = ran.out.splitlines()
    assert sum(line.startswith("product, ") for line in lines) == 25
    assert any(line.startswith("attention, prefill") for line in lines)
    assert max(map(len, lines[2:])) <= 80


def test_reference_runner_is_refused(octavo, model):
    ran = octavo("bench", "kernels", model, "--runner", "reference")

    assert ran.code == 2
    assert ran.out == ""
    assert "--runner" in ran.err


def test_help_has_examples_that_parse(octavo):
    assert "Examples:" in octavo("bench", "kernels", "-h").out
    for example in command.examples:
        args = split_example(example)
        assert args[:2] == ["bench", "kernels"]
        command.make_context("kernels", args[2:])
