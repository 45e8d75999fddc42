"""A log of another start is refused with what differs, however alike the weights are."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.machine import read_machine
from octavo.errors import InvalidParameterError
from octavo.llm.find_subject import find_subject
from octavo.planner.foreign_log import refuse_foreign
from octavo.planner.plan import Plan, Surroundings, make_plan
from octavo.planner.question import PlanQuestion
from octavo.planner.start_log import read_start_log

LOGS = Path(__file__).parents[1] / "data" / "start_logs"
LLAMA, QWEN3, QWEN25 = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B-Instruct"


def check(text: str, model: str, **asked) -> None:
    question = PlanQuestion(model=model, **asked)
    refuse_foreign(read_start_log(text), question, find_subject(model, {}, is_bundled_only=True))


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def named(text: str, model: str) -> str:
    """Return a log that names its model otherwise."""
    return f"non-default args: {{'model': '{model}'}}\n" + text


def test_a_log_of_the_model_itself_is_taken():
    check(log("vllm_0_19_tp2"), QWEN25)
    check(log("vllm_0_19_tp2"), QWEN25, device="h100-80gb", devices=2, engine_version="0.19.1")
    check(log("vllm_0_30"), LLAMA)
    check(log("sglang_2025_03"), "Qwen/Qwen2.5-32B-Instruct")


def test_a_published_name_of_another_shape_is_refused_with_what_differs():
    with pytest.raises(InvalidParameterError) as caught:
        check(named(log("vllm_0_30"), QWEN3), LLAMA)
    assert "the log is of 'Qwen/Qwen3-8B', the plan is for meta-llama/Meta-Llama-3-8B" in caught.value.message
    assert "36 layers against 32" in caught.value.because
    with pytest.raises(InvalidParameterError) as caught:
        check(named(log("vllm_0_30"), "/data/models/Llama-2-7b-hf/"), LLAMA)
    assert "32 heads of 128 in a layer's KV cache against 8 heads of 128" in caught.value.because


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B-Instruct", "/srv/models/llama-3-8b", "./tuned", "org/my-own-8b", "tuned"]
)
def test_another_name_of_the_same_shape_or_of_nobody_is_taken(name):
    check(named(log("vllm_0_30"), name), LLAMA)


def test_what_a_token_costs_gives_another_model_of_the_same_weights_away():
    with pytest.raises(InvalidParameterError) as caught:
        check(named(log("vllm_0_30"), "org/some-8b"), QWEN3)
    assert "takes 128 KiB a token" in caught.value.message
    assert "takes 144 KiB in bf16, 72.0 KiB in fp8" in caught.value.message
    assert "it names 'org/some-8b'" in caught.value.because
    # Half of it is the same model with a cache in 8 bits.
    half = log("vllm_0_30").replace("460,496 tokens", "920,992 tokens").replace("3.51x", "7.03x")
    check(half, LLAMA)


def test_a_log_of_another_cut_or_release_names_both():
    with pytest.raises(InvalidParameterError, match="tensor parallel size 2, the plan is for tensor") as caught:
        check(log("vllm_0_19_tp2"), QWEN25, device="h100-80gb", devices=4)
    assert caught.value.hints[0] == "`--devices 2`"
    with pytest.raises(InvalidParameterError, match="the plan is for tensor parallel size 1 and 2 stages") as caught:
        check(log("vllm_0_19_tp2"), QWEN25, pipeline_parallel_size=2)
    assert caught.value.hints[0] == "`--devices 2 --pipeline-parallel-size 1`"
    # This one does not say how it was cut, but a quarter of the heads would take a quarter of the bytes.
    with pytest.raises(
        InvalidParameterError, match=r"log is of tensor parallel size 1, the plan is for .* 4"
    ) as caught:
        check(log("vllm_0_30"), LLAMA, tensor_parallel_size=4)
    assert caught.value.hints[0] == "`--tensor-parallel-size 1`"
    with pytest.raises(InvalidParameterError, match=r"vllm 0\.19\.0, the plan is for 0\.11") as caught:
        check(log("vllm_0_19_tp2"), QWEN25, engine_version="0.11")
    assert caught.value.hints == ("`--engine-version 0.19`",)


def test_a_plan_says_which_model_its_log_names(tmp_path):
    path = tmp_path / "start.log"
    path.write_text(named(log("vllm_0_30"), "org/some-8b"))
    machine = read_machine()

    def planned(**asked) -> Plan:
        question = PlanQuestion(model=LLAMA, **asked)
        subject = find_subject(LLAMA, {}, is_bundled_only=True)
        return make_plan(question, subject, surroundings=Surroundings(machine=machine, calibrate_path=path))

    weights = next(each for each in planned().sources if each.name == "weights")
    assert "that names 'org/some-8b'" in weights.source
    with pytest.raises(InvalidParameterError, match=r"the plan is for 0\.11"):
        planned(engine_version="0.11")
