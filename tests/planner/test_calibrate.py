"""What a log of a real start teaches: how far the rules were off, and a budget corrected by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import InvalidParameterError
from octavo.planner.calibrate import calibrate
from octavo.planner.devices import find_device
from octavo.planner.engine_budget import EngineSettings
from octavo.planner.engine_rules import engine_budget
from octavo.planner.estimate import exact
from octavo.planner.forward_shape import ForwardShape
from octavo.planner.start_log import StartLog, read_start_log
from octavo.units import GIB

LOGS = Path(__file__).parents[1] / "data" / "start_logs"

LLAMA_8B = ForwardShape(vocab_size=128_256, hidden_size=4096, num_layers=32, mlp_width=14_336)
QWEN_7B = ForwardShape(vocab_size=152_064, hidden_size=3584, num_layers=28, mlp_width=18_944)
QWEN3_8B = ForwardShape(vocab_size=151_936, hidden_size=4096, num_layers=36, mlp_width=12_288)


def read(name: str) -> StartLog:
    return read_start_log((LOGS / f"{name}.log").read_text(encoding="utf-8"))


def gib(value: float):
    return exact(int(value * GIB), source="by hand")


def by_name(calibration):
    return {each.term: each for each in calibration.terms}


def test_a_log_that_tells_every_term_is_compared_term_by_term():
    found = calibrate(
        replace(read("vllm_0_6_5"), max_num_batched_tokens=20_000),
        forward=LLAMA_8B,
        weights=gib(14.96),
        settings=EngineSettings(max_model_len=1),
    )
    terms = by_name(found)
    assert set(terms) == {"weights", "activation", "overhead", "KV pool"}
    # 14.96 GiB counted, of which 14.987 are expected to be loaded; 14.9888 were.
    assert terms["weights"].difference_bytes == pytest.approx(0.0013 * GIB, abs=0.001 * GIB)
    assert found.weight_ratio == pytest.approx(1.0001, abs=0.0001)
    # 20,000 tokens x 2 B x (3 x 14,336 + 3 x 4,096) = 2.06 GiB, against 2.07 logged.
    assert terms["activation"].difference_bytes == pytest.approx(0.01 * GIB, abs=0.005 * GIB)
    assert terms["activation"].difference_ratio == pytest.approx(0.005, abs=0.003)
    assert all(each.is_inside for each in terms.values())
    assert found.rule_budget.max_num_batched_tokens == 20_000


def test_a_log_of_weights_and_pool_tells_the_other_two_together():
    found = calibrate(
        read("vllm_0_19_tp2"),
        forward=QWEN_7B,
        weights=gib(7.12),
        settings=EngineSettings(max_model_len=1),
        device=find_device("h100"),
    )
    terms = by_name(found)
    assert set(terms) == {"weights", "activation and overhead", "CUDA graphs", "KV pool"}
    # 79.19 x 0.95 - 7.12 - 63.84 = 4.27 GiB.
    assert terms["activation and overhead"].logged_bytes == pytest.approx(4.27 * GIB, abs=0.01 * GIB)
    assert terms["activation and overhead"].is_inside
    assert found.activation_ratio == 1.0
    assert found.overhead_bytes == terms["activation and overhead"].difference_bytes


def test_the_corrected_budget_of_the_same_start_is_what_was_logged():
    for name, forward, weights, device in (
        ("vllm_0_6_4", LLAMA_8B, 67.65, None),
        ("vllm_0_6_5", LLAMA_8B, 14.9888, None),
        ("vllm_0_19_tp2", QWEN_7B, 7.12, "h100"),
        ("vllm_0_27", QWEN3_8B, 7.64, "rtx3090"),
    ):
        log = read(name)
        found = calibrate(
            log,
            forward=forward,
            weights=gib(weights),
            settings=EngineSettings(max_model_len=4096),
            device=None if device is None else find_device(device),
        )
        corrected = found.corrected(found.rule_budget)
        assert corrected.kv_pool.value_bytes == pytest.approx(log.kv_pool_bytes, abs=0.02 * GIB), name
        assert corrected.kv_pool.holds(log.kv_pool_bytes), name
        # What was unknown before is known now.
        width = corrected.kv_pool.high_bytes - corrected.kv_pool.low_bytes
        assert width < found.rule_budget.kv_pool.high_bytes - found.rule_budget.kv_pool.low_bytes, name
        assert log.version in corrected.kv_pool.source


def test_a_start_of_a_release_that_no_rule_was_fitted_on_lies_in_the_wider_interval():
    found = calibrate(
        read("vllm_0_30"), forward=LLAMA_8B, weights=gib(14.958), settings=EngineSettings(max_model_len=131_072)
    )
    assert {each.term for each in found.terms} == {"weights", "activation", "overhead", "CUDA graphs", "KV pool"}
    assert all(each.is_inside for each in found.terms)
    assert found.activation_ratio < 1  # it takes less than the rule of older releases says
    assert found.corrected(found.rule_budget).kv_pool.value_bytes == pytest.approx(56.21 * GIB, abs=0.3 * GIB)


def test_what_was_learnt_holds_for_other_settings_too():
    log = replace(read("vllm_0_6_5"), activation_bytes=int(2.5 * GIB), max_num_batched_tokens=20_000)
    settings = EngineSettings(max_model_len=20_000)
    found = calibrate(log, forward=LLAMA_8B, weights=gib(14.9888), settings=settings)
    assert found.activation_ratio == pytest.approx(2.5 / 2.06, abs=0.01)

    other = replace(settings, max_model_len=29_000, utilization=0.95)
    budget = engine_budget(
        "vllm",
        forward=LLAMA_8B,
        weights=gib(14.9888),
        settings=other,
        visible=exact(log.visible_bytes, source="the log"),
        version="0.6.5",
    )
    corrected = found.corrected(budget)
    assert corrected.activation.value_bytes == pytest.approx(budget.activation.value_bytes * 2.5 / 2.06, rel=0.01)
    assert corrected.overhead.value_bytes == pytest.approx(0.35 * GIB, abs=0.01 * GIB)
    assert corrected.utilization == 0.95
    spent = sum(each.value_bytes for each in (corrected.weights, corrected.activation, corrected.overhead))
    assert corrected.kv_pool.value_bytes == corrected.usable.value_bytes - spent


def test_weights_of_a_checkpoint_that_was_loaded_otherwise_are_learnt_as_a_share():
    log = replace(read("vllm_0_19_tp2"), weight_bytes=int(8.9 * GIB))
    settings = EngineSettings(max_model_len=8192)
    found = calibrate(log, forward=QWEN_7B, weights=gib(7.12), settings=settings, device=find_device("h100"))
    assert not by_name(found)["weights"].is_inside
    alone = engine_budget(
        "vllm", forward=QWEN_7B, weights=gib(14.2), settings=settings, device=find_device("h100"), version="0.19"
    )
    learnt = found.corrected(alone).weights
    assert learnt.value_bytes == pytest.approx(8.9 / 7.14 * 14.2 * GIB, rel=0.003)
    assert learnt.high_bytes - learnt.low_bytes < 0.15 * GIB


def test_graphs_count_in_the_sum_since_they_are_taken_from_the_pool():
    found = calibrate(
        read("vllm_0_27"),
        forward=QWEN3_8B,
        weights=gib(7.64),
        settings=EngineSettings(max_model_len=1),
        device=find_device("rtx3090"),
    )
    # 23.58 x 0.82 - 7.64 - 6.87 - 0.36 = 4.47 GiB.
    assert by_name(found)["activation and overhead"].logged_bytes == pytest.approx(4.466 * GIB, abs=0.01 * GIB)
    assert by_name(found)["CUDA graphs"].is_inside
    assert found.rule_budget.graphs_inside


def test_sglang_is_compared_with_its_own_rule():
    found = calibrate(
        read("sglang_2025_03"),
        forward=ForwardShape(vocab_size=152_064, hidden_size=5120, num_layers=64, mlp_width=27_648),
        weights=gib(15.54),
        settings=EngineSettings(max_model_len=1),
        device=find_device("l4"),
    )
    assert found.rule_budget.engine == "sglang"
    assert found.rule_budget.utilization == 0.85
    # An L4 shows 22.07 GiB, of which 21.63 are free before the weights: 22.07 x 0.85 - 15.54 - 2.84 = 0.38 GiB.
    assert by_name(found)["activation and overhead"].logged_bytes == pytest.approx(0.38 * GIB, abs=0.01 * GIB)
    assert by_name(found)["activation and overhead"].is_inside
    corrected = found.corrected(found.rule_budget)
    assert corrected.kv_pool.value_bytes == pytest.approx(2.84 * GIB, abs=0.02 * GIB)


def test_the_device_is_asked_for_where_the_log_does_not_tell_its_memory():
    with pytest.raises(InvalidParameterError, match="how much memory") as caught:
        calibrate(
            read("vllm_0_19_tp2"), forward=QWEN_7B, weights=gib(7.12), settings=EngineSettings(max_model_len=8192)
        )
    assert "--device" in caught.value.hints[0]


def test_an_engine_that_takes_what_it_is_told_has_no_rule_to_correct():
    with pytest.raises(InvalidParameterError, match=r"llama\.cpp"):
        calibrate(read("llama_cpp_2026"), forward=QWEN_7B, weights=gib(1), settings=EngineSettings(max_model_len=8192))


@pytest.mark.parametrize("weights", [3.5, 15.0])
def test_a_log_of_another_model_is_refused(weights):
    with pytest.raises(InvalidParameterError, match="another model") as caught:
        calibrate(
            read("vllm_0_19_tp2"),
            forward=LLAMA_8B,
            weights=gib(weights),
            settings=EngineSettings(max_model_len=8192),
            device=find_device("h100"),
        )
    assert "Qwen/Qwen2.5-7B-Instruct" in caught.value.because
    assert "7.1 GiB" in caught.value.message
