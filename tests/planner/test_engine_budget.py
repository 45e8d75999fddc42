"""How other engines spend memory: the rules against what real starts logged, and what they do at their edges."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from octavo.models.catalogue import find_model
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.devices import find_device
from octavo.planner.engine_budget import EngineBudget, EngineSettings
from octavo.planner.engine_rules import engine_budget
from octavo.planner.estimate import around, exact
from octavo.planner.forward_shape import ForwardShape, forward_shape
from octavo.units import GIB

DATA = Path(__file__).parents[1] / "data" / "engine_budget"
HALF_A_HUNDREDTH = 0.005 * GIB  # logs print two digits

DENSE = ForwardShape(vocab_size=128_256, hidden_size=4096, num_layers=32, mlp_width=14_336)
SETTINGS = EngineSettings(max_model_len=8192)
H100 = find_device("h100")


@dataclass(frozen=True)
class Run:
    """One start, as logged; sizes in GiB."""

    row: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.row[name]

    def __str__(self) -> str:
        return f"{self.model} on {self.tensor_parallel_size}, vLLM {self.version}"

    @property
    def budget(self) -> EngineBudget:
        """What the rules say, from the model's configuration and the settings."""
        shape = shape_of(self.model)
        is_counted = self.weights_as == "16-bit"
        return engine_budget(
            "vllm",
            forward=forward_shape(shape) if self.weights_as != "mxfp4" else without_buffers(forward_shape(shape)),
            weights=exact(
                rank_bytes(shape, self.tensor_parallel_size) if is_counted else int(self.weights_gib * GIB),
                source="config" if is_counted else "log",
            ),
            weights_from="config" if is_counted else "log",
            visible=around(self.device_gib * GIB, below=HALF_A_HUNDREDTH, above=HALF_A_HUNDREDTH, source="log"),
            version=self.version,
            settings=EngineSettings(
                max_model_len=self.max_model_len,
                utilization=self.utilization,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                tensor_parallel_size=self.tensor_parallel_size,
            ),
        )

    @property
    def error(self) -> float:
        """How far the predicted pool is off, as a share of the real one."""
        return self.budget.kv_pool.value_bytes / (self.kv_pool_gib * GIB) - 1


def without_buffers(forward: ForwardShape) -> ForwardShape:
    return replace(forward, has_expert_buffers=False)


@cache
def shape_of(name: str) -> ModelShape:
    found = find_model(name)
    return shape_from_hf(found.config, where=found.name, name=found.name)


def rank_bytes(shape: ModelShape, ranks: int) -> int:
    """Count 16-bit weights of one device: what cannot be divided is held whole."""
    return sum(2 * each.num_elements // min(ranks, each.num_shards) for each in shape.tensors)


RUNS = [Run(row) for row in json.loads((DATA / "vllm_runs.json").read_text(encoding="utf-8"))]
CONTROLLED = [run for run in RUNS if run.is_controlled]


def test_the_pool_of_controlled_runs_is_predicted_within_one_percent_on_average_and_six_at_worst():
    errors = {str(run): run.error for run in CONTROLLED}
    assert len(CONTROLLED) == 52
    average = mean(abs(run.error) for run in CONTROLLED)
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"{len(CONTROLLED)} runs: {average:.2%} off on average, {errors[worst]:+.2%} at worst ({worst})")
    assert average < 0.01
    assert abs(errors[worst]) < 0.06, worst


def test_the_real_pool_lies_in_the_printed_interval_nineteen_times_out_of_twenty():
    outside = [str(run) for run in RUNS if not within(run)]
    left_out = json.loads((DATA / "left_out.json").read_text(encoding="utf-8"))
    print(f"{len(RUNS) - len(outside)} of {len(RUNS)} inside; outside: {outside}; left out:")
    for each in left_out:
        print(f"  {each['source']}, {each['model']}: {each['reason']}")
    assert len(RUNS) == 65
    assert len(outside) <= 0.05 * len(RUNS), outside
    assert all(each["reason"] for each in left_out)


def within(run: Run) -> bool:
    pool, real = run.budget.kv_pool, run.kv_pool_gib * GIB
    return pool.low_bytes - HALF_A_HUNDREDTH <= real <= pool.high_bytes + HALF_A_HUNDREDTH


def test_an_interval_is_narrow_enough_to_be_of_use():
    widths = [
        (run.budget.kv_pool.high_bytes - run.budget.kv_pool.low_bytes) / (run.device_gib * GIB) for run in CONTROLLED
    ]
    assert mean(widths) < 0.02  # of the device's memory
    assert max(widths) < 0.04


@pytest.mark.parametrize("term", ["activation", "overhead", "graphs", "weights"])
def test_each_term_of_controlled_runs_lies_in_its_interval(term):
    logged = [run for run in CONTROLLED if run.row[f"{term}_gib"] is not None]
    assert len(logged) >= 30
    outside = []
    for run in logged:
        estimate, real = getattr(run.budget, term), run.row[f"{term}_gib"] * GIB
        if not estimate.low_bytes - HALF_A_HUNDREDTH <= real <= estimate.high_bytes + HALF_A_HUNDREDTH:
            outside.append((str(run), estimate.value_bytes / GIB, real / GIB))
    assert len(outside) <= 0.05 * len(logged), outside
