"""How other engines spend memory: the rules against what real starts logged, and what they do at their edges."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from octavo.errors import InvalidParameterError
from octavo.models.catalogue import find_model
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.planner.devices import find_device
from octavo.planner.engine_budget import EngineBudget, EngineSettings
from octavo.planner.engine_rules import engine_budget
from octavo.planner.estimate import around, exact
from octavo.planner.forward_shape import ForwardShape, forward_shape
from octavo.planner.loaded_weights import loaded_weights
from octavo.planner.weight_arithmetic import rank_weights
from octavo.units import GIB

DATA = Path(__file__).parents[1] / "data" / "engine_budget"
HALF_A_HUNDREDTH = 0.005 * GIB  # logs print two digits

# How a checkpoint is packed, as our own words have it; `auto` is what the model's own configuration says.
SCHEMES = {
    "16-bit": "auto",
    "mxfp4": "auto",
    "fp8": "fp8",
    "w8a8": "w8a8",
    "w4a16": "w4a16",
    "awq": "awq",
    "moe_wna16": "awq",
}

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
        weights = rank_weights(
            shape,
            weight_dtype=SCHEMES[self.weights_as],
            tensor_parallel_size=self.tensor_parallel_size,
            is_padded=True,
        )
        return engine_budget(
            "vllm",
            forward=forward_shape(shape),
            weights=exact(weights.num_bytes, source="config"),
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


RUNS = [Run(row) for row in json.loads((DATA / "vllm_runs.json").read_text(encoding="utf-8"))]
CONTROLLED = [run for run in RUNS if run.is_controlled]


def test_the_pool_of_controlled_runs_is_predicted_within_one_percent_on_average_and_six_at_worst():
    errors = {str(run): run.error for run in CONTROLLED}
    assert len(CONTROLLED) == 52
    average = mean(abs(run.error) for run in CONTROLLED)
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"{len(CONTROLLED)} runs: {average:.2%} off on average, {errors[worst]:+.2%} at worst ({worst})")
    assert average < 0.004  # 1 % is the promise; what was reached is kept
    assert abs(errors[worst]) < 0.06, worst


def test_the_real_pool_lies_in_the_printed_interval_nineteen_times_out_of_twenty():
    outside = [str(run) for run in RUNS if not within(run)]
    left_out = json.loads((DATA / "left_out.json").read_text(encoding="utf-8"))
    print(f"{len(RUNS) - len(outside)} of {len(RUNS)} inside; outside: {outside}; left out:")
    for each in left_out:
        print(f"  {each['source']}, {each['model']}: {each['reason']}")
    assert len(RUNS) == 67
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


def vllm(forward: ForwardShape = DENSE, *, version: str | None = None, weights_gib: float = 15.0, **settings):
    return engine_budget(
        "vllm",
        forward=forward,
        weights=exact(int(weights_gib * GIB), source="by hand"),
        weights_from="log",
        settings=replace(SETTINGS, **settings),
        device=H100,
        version=version,
    )


def gib(estimate) -> float:
    return estimate.value_bytes / GIB


@pytest.mark.parametrize("version", [None, "0.5", "0.12", "0.17", "0.19", "0.23", "0.30"])
def test_terms_add_up_to_what_may_be_used(version):
    budget = vllm(version=version)
    spent = sum(each.value_bytes for each in (budget.weights, budget.activation, budget.overhead, budget.kv_pool))
    assert budget.usable.value_bytes == spent + (budget.graphs.value_bytes if budget.graphs_inside else 0)


def test_the_sampler_is_the_peak_of_a_large_vocabulary_and_the_mlp_that_of_a_wide_one():
    # 14.75 B x 1,024 x 128,256 + 2 B x 8,192 x 4,096 + 0.01 GiB.
    assert vllm().activation.value_bytes == pytest.approx(14.75 * 1024 * 128_256 + 2**26 + 0.01 * GIB, abs=1)
    wide = replace(DENSE, mlp_width=65_536)
    # 2 B x 8,192 x (3 x 65,536 + 3 x 4,096) + 0.08 GiB.
    assert vllm(wide).activation.value_bytes == pytest.approx(2 * 8192 * 3 * (65_536 + 4096) + 0.08 * GIB, abs=1)
    without_gate = vllm(replace(wide, is_gated=False)).activation.value_bytes
    assert without_gate == pytest.approx(2 * 8192 * (2 * 65_536 + 3 * 4096) + 0.08 * GIB, abs=1)


def test_a_large_step_of_a_small_vocabulary_costs_what_its_mlp_does():
    small = replace(DENSE, vocab_size=32_000)
    assert gib(vllm(small, max_num_batched_tokens=65_536).activation) == pytest.approx(
        65_536 * 2 * 3 * (14_336 + 4096) / GIB + 0.08, abs=0.01
    )
    shared = vllm(small, max_num_batched_tokens=65_536, tensor_parallel_size=4).activation
    assert gib(shared) == pytest.approx(65_536 * 2 * 3 * (14_336 / 4 + 4096) / GIB + 0.08, abs=0.01)


def test_fewer_sequences_leave_more_for_the_pool():
    assert gib(vllm(max_num_seqs=64).kv_pool) - gib(vllm(max_num_seqs=1024).kv_pool) > 0.5
    assert vllm(max_num_seqs=4096, max_num_batched_tokens=512).max_num_seqs == 512  # a step has no more rows


def test_releases_before_0_17_sorted_all_logits():
    assert gib(vllm(version="0.16").activation) == pytest.approx(38 * 1024 * 128_256 / GIB + 0.0625 + 0.05, abs=0.01)
    assert vllm(version="v0.16.0").kv_pool.value_bytes < vllm(version="0.17").kv_pool.value_bytes


def test_the_first_engine_tried_a_whole_prompt_of_the_greatest_length():
    short, long = vllm(version="0.6", max_model_len=20_000), vllm(version="0.6", max_model_len=29_000)
    assert (short.max_num_batched_tokens, long.max_num_batched_tokens) == (20_000, 29_000)
    # 9,000 tokens x 2 B x 3 x (14,336 + 4,096): what two starts of one model differed by (vllm-project/vllm#10517).
    assert gib(long.activation) - gib(short.activation) == pytest.approx(9000 * 6 * (14_336 + 4096) / GIB, abs=0.001)
    assert vllm(version="0.6", max_model_len=33_000).max_num_batched_tokens == 512
    assert vllm(version="0.7", max_model_len=33_000).max_num_batched_tokens == 2048
    assert vllm(version="0.6", max_model_len=100).max_num_batched_tokens == 2048


def test_defaults_follow_the_device_and_the_release():
    assert (vllm().max_num_batched_tokens, vllm().max_num_seqs) == (8192, 1024)
    assert vllm(version="0.7").max_num_seqs == 256
    for name in ("a100-80gb", "rtx4090"):
        budget = engine_budget(
            "vllm", forward=DENSE, weights=exact(GIB, source=""), settings=SETTINGS, device=find_device(name)
        )
        assert (budget.max_num_batched_tokens, budget.max_num_seqs) == (2048, 256), name
    assert [vllm(version=each).utilization for each in ("0.7", "0.24", "0.25")] == [0.9, 0.9, 0.92]
    assert vllm(utilization=0.5).usable.value_bytes == H100.visible_bytes // 2


def test_graphs_are_taken_from_the_pool_since_0_21():
    before, since = vllm(version="0.20"), vllm(version="0.21")
    assert not before.graphs_inside and since.graphs_inside
    assert since.kv_pool.value_bytes < before.kv_pool.value_bytes - 0.3 * GIB
    eager = vllm(version="0.21", is_eager=True)
    assert eager.graphs.value_bytes == 0
    assert eager.kv_pool.value_bytes - since.kv_pool.value_bytes == since.graphs.value_bytes


def test_graphs_that_the_utilisation_leaves_no_room_for_are_warned_of():
    assert any("out-of-memory" in note for note in vllm(utilization=0.99).notes)
    assert not any("out-of-memory" in note for note in vllm(utilization=0.9).notes)
    assert not any("out-of-memory" in note for note in vllm(utilization=0.99, is_eager=True).notes)


def test_devices_that_talk_need_more_and_each_doubling_a_little_more():
    overheads = [gib(vllm(tensor_parallel_size=size).overhead) for size in (1, 2, 4, 8)]
    assert all(later > earlier for earlier, later in pairwise(overheads))
    assert overheads[1] - overheads[0] > 1.5 > overheads[3] - overheads[1]
    staged = vllm(pipeline_parallel_size=2).overhead
    assert overheads[0] < gib(staged) < overheads[1]
    assert staged.holds(overheads[0] * GIB) and staged.holds(overheads[1] * GIB)


def test_experts_keep_buffers_beside_either_peak():
    mixture = ForwardShape(
        vocab_size=32_000, hidden_size=4096, num_layers=32, expert_width=14_336, num_experts_per_token=2
    )
    # 2 B x 8,192 x 2 experts x (2 x 14,336 + 14,336) = 1.3 GiB, on two devices half of it.
    whole = 2 * 8192 * 2 * 3 * 14_336
    plain = without_buffers(mixture)
    assert vllm(mixture).activation.value_bytes - vllm(plain).activation.value_bytes == pytest.approx(whole, abs=1)
    halved = vllm(mixture, tensor_parallel_size=2), vllm(plain, tensor_parallel_size=2)
    assert halved[0].activation.value_bytes - halved[1].activation.value_bytes == pytest.approx(whole / 2, abs=1)


def test_experts_narrower_than_the_model_are_sized_by_its_hidden_rows():
    narrow = ForwardShape(vocab_size=32_000, hidden_size=4096, num_layers=32, expert_width=768, num_experts_per_token=8)
    # 2 B x 8,192 x 8 experts x (4,096 + 768): the hidden rows are wider than 2 x 768, and no device has less of them.
    for ranks, inner in ((1, 768), (4, 768 / 4)):
        extra = (
            vllm(narrow, tensor_parallel_size=ranks).activation.value_bytes
            - vllm(without_buffers(narrow), tensor_parallel_size=ranks).activation.value_bytes
        )
        assert extra == pytest.approx(2 * 8192 * 8 * (4096 + inner), abs=1)


def test_latent_attention_keeps_rows_of_long_prompts_and_holds_its_weights_twice():
    latent = replace(DENSE, latent_width=576)
    # 2 B x 65,536 rows (8 x max_model_len, or fewer) x 576.
    assert vllm(latent).activation.value_bytes - vllm().activation.value_bytes == 2 * 65_536 * 576
    short = vllm(latent, max_model_len=1024).activation.value_bytes - vllm(max_model_len=1024).activation.value_bytes
    assert short == 2 * 8 * 1024 * 576
    plain, twice = (
        loaded_weights(exact(10 * GIB, source="by hand"), forward).value_bytes for forward in (DENSE, latent)
    )
    assert twice - plain == pytest.approx(0.15 * GIB, abs=1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_activation_and_overhead_lean_neither_way(ranks):
    runs = [run for run in CONTROLLED if run.tensor_parallel_size == ranks]
    off = sorted(
        run.device_gib * run.utilization
        - run.weights_gib
        - run.kv_pool_gib
        - gib(run.budget.activation)
        - gib(run.budget.overhead)
        for run in runs
    )
    assert len(off) >= 8
    assert abs(off[len(off) // 2]) < 0.03  # GiB, the median


def test_what_is_not_known_widens_the_interval():
    def width(budget):
        return budget.kv_pool.high_bytes - budget.kv_pool.low_bytes

    fitted = width(vllm(version="0.19"))
    assert width(vllm(version="0.23")) > 3 * fitted  # later than any reading
    assert width(vllm(version="0.6")) > 3 * fitted  # a few readings that differ
    assert width(vllm(replace(DENSE, sees_images=True))) > 2 * fitted
    assert width(vllm(replace(DENSE, has_states=True))) > 1.2 * fitted
    assert width(vllm(tensor_parallel_size=16)) > width(vllm(tensor_parallel_size=4))


def test_towers_count_where_only_a_configuration_was_read():
    def weights(weights_from):
        return engine_budget(
            "vllm",
            forward=replace(DENSE, sees_images=True),
            weights=exact(10 * GIB, source="by hand"),
            weights_from=weights_from,
            settings=SETTINGS,
            device=H100,
        ).weights

    assert weights("log").is_exact
    assert 10 < gib(weights("files")) < 10.1
    assert 10.7 < gib(weights("config")) < 11.3
    assert weights("config").low_bytes < 10.5 * GIB and weights("config").high_bytes > 11.65 * GIB


def test_weights_that_do_not_fit_leave_less_than_nothing():
    budget = vllm(weights_gib=79)
    assert budget.kv_pool.value_bytes < 0


def test_a_persons_own_memory_wins_over_the_devices():
    budget = engine_budget(
        "vllm",
        forward=DENSE,
        weights=exact(GIB, source=""),
        settings=SETTINGS,
        device=H100,
        visible=exact(24 * GIB, source="--memory"),
    )
    assert budget.usable.value_bytes == int(24 * GIB * 0.9)


def sglang(**changes):
    asked = {"version": "0.5.4", "device": H100, "weights_gib": 15.0} | changes
    return engine_budget(
        "sglang",
        forward=DENSE,
        weights=exact(int(asked.pop("weights_gib") * GIB), source="by hand"),
        weights_from="log",
        version=asked.pop("version"),
        device=asked.pop("device"),
        settings=replace(SETTINGS, **asked),
    )


def test_sglang_divides_a_share_between_weights_and_pool():
    budget = sglang(utilization=0.8)
    assert budget.usable.value_bytes == int(H100.visible_bytes * 0.8)
    assert budget.usable.value_bytes == sum(
        each.value_bytes for each in (budget.weights, budget.activation, budget.overhead, budget.kv_pool)
    )
    assert budget.block_size == 1


def test_sglangs_own_share_depends_on_release_device_and_group():
    assert [sglang(version="0.4.6.post1", tensor_parallel_size=size).utilization for size in (1, 2, 4, 8, 16)] == [
        0.88,
        0.87,
        0.85,
        0.81,
        0.79,
    ]
    # 80 GB: 0.5 GiB + 1.5 MiB x 8,192 + 2 MiB x 256 + 0.125 GiB = 13.1 GiB of 79.19 are left to all else.
    assert sglang().utilization == round((79.19 - (512 + 1.5 * 8192 + 512 + 128) / 1024) / 79.19, 3)
    # 24 GB: 0.5 GiB + 1.5 MiB x 2,048 + 2 MiB x 24 + 0.125 GiB = 3.67 GiB of 23.58.
    small = sglang(device=find_device("rtx3090"))
    assert small.utilization == round((23.58 - (512 + 3072 + 48 + 128) / 1024) / 23.58, 3)
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 24)


def test_the_pool_that_a_start_of_sglang_logged_lies_in_the_interval():
    # Qwen2.5 32B on four L4: 2.84 GiB for each.
    forward = ForwardShape(vocab_size=152_064, hidden_size=5120, num_layers=64, mlp_width=27_648)
    budget = engine_budget(
        "sglang",
        forward=forward,
        weights=exact(int(15.54 * GIB), source="log"),
        weights_from="log",
        version="0.4.3",
        device=find_device("l4"),
        settings=EngineSettings(max_model_len=32_768, tensor_parallel_size=4),
    )
    assert budget.kv_pool.holds(2.84 * GIB)
    assert gib(budget.kv_pool) == pytest.approx(2.84, rel=0.1)


def test_a_share_that_does_not_even_hold_the_weights_is_seen_before_the_start():
    # 0.88 of an H200 is less than 125.65 GiB of weights: this start was refused (SemiAnalysisAI/InferenceX#2128).
    refused = sglang(device=find_device("h200"), weights_gib=125.65, utilization=0.88, tensor_parallel_size=8)
    assert refused.kv_pool.high_bytes < 0
    allowed = sglang(device=find_device("h200"), weights_gib=125.65, utilization=0.93, tensor_parallel_size=8)
    assert allowed.kv_pool.value_bytes > 0


@pytest.mark.parametrize("engine", ["octavo", "tgi", "", "VLLM"])
def test_an_engine_without_rules_is_refused(engine):
    with pytest.raises(InvalidParameterError, match="engine"):
        engine_budget(engine, forward=DENSE, weights=exact(1, source=""), settings=SETTINGS, device=H100)


def test_a_cpu_is_refused_since_its_pool_is_a_setting_there():
    with pytest.raises(InvalidParameterError, match="on a CPU") as caught:
        engine_budget("vllm", forward=DENSE, weights=exact(1, source=""), settings=SETTINGS, device=find_device("epyc"))
    assert "--engine" in caught.value.hints[0]


def test_other_makers_devices_are_planned_for_with_a_warning():
    def notes(name):
        return " ".join(
            engine_budget(
                "vllm", forward=DENSE, weights=exact(1, source=""), settings=SETTINGS, device=find_device(name)
            ).notes
        )

    assert "no start of vllm on such a device" in notes("mi300x")
    assert "no start" not in notes("h100")


def test_widths_are_read_off_the_tensors_of_a_model():
    assert forward_shape(shape_of("meta-llama/Llama-3.1-8B")) == DENSE
    mixture = forward_shape(shape_of("mistralai/Mixtral-8x7B-v0.1"))
    assert (mixture.mlp_width, mixture.expert_width, mixture.num_experts_per_token) == (0, 14_336, 2)
    assert mixture.is_mixture and mixture.has_expert_buffers
    latent = forward_shape(shape_of("deepseek-ai/DeepSeek-V3"))
    assert (latent.mlp_width, latent.expert_width, latent.num_experts_per_token) == (18_432, 2048, 8)
    assert latent.latent_width == 576
    assert forward_shape(shape_of("google/gemma-3-12b-it")).sees_images
    assert not forward_shape(shape_of("openai-community/gpt2")).is_gated
    assert not forward_shape(shape_of("openai/gpt-oss-20b")).has_expert_buffers
    assert forward_shape(shape_of("Qwen/Qwen3-Next-80B-A3B-Instruct")).has_states
