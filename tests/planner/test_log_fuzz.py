"""Start-up logs with numbers that no engine prints, cut and mixed: a plan or one of our errors, nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import OctavoError
from octavo.llm.plan import plan_for
from octavo.planner.question import question_from_words

LOGS = Path(__file__).parents[1] / "data" / "start_logs"
MODELS = {
    "vllm_0_10_debug": "qwen3-0.6b",
    "vllm_0_19_tp2": "qwen2.5-7b-instruct",
    "vllm_0_2": "llama-2-13b",
    "vllm_0_27": "qwen3-8b",
    "vllm_0_30": "llama-3-8b",
    "vllm_0_6_5": "llama-3.1-8b",
    "sglang_2025_03": "qwen2.5-32b-instruct",
    "sglang_windows": "llama-3-8b",
}
NUMBER = re.compile(r"\d+(?:\.\d+)?")
ODD = ("0", "0.0", "-1", "999999999999", "1e9", "12,345", ",", ".", "1.2.3", "9" * 400, "", "nan")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(MODELS)),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(ODD)), max_size=3),
    cut=st.none() | st.tuples(st.integers(0, 5000), st.integers(1, 500)),
    device=st.sampled_from(["", "h100", "l4", "cpu"]),
    devices=st.sampled_from(["", "1", "2"]),
)
def test_a_log_of_odd_numbers_is_read_or_refused(tmp_path, name, changes, cut, device, devices):
    text = (LOGS / f"{name}.log").read_text(encoding="utf-8")
    if cut is not None:
        text = text[: cut[0]] + text[sum(cut) :]
    for index, odd in changes:
        found = list(NUMBER.finditer(text))
        if found:
            match = found[index % len(found)]
            text = text[: match.start()] + odd + text[match.end() :]
    (tmp_path / "start.log").write_text(text, encoding="utf-8")
    asked = question_from_words({"model": MODELS[name], "device": device, "devices": devices})
    try:
        found_plan = plan_for(asked, calibrate_path=tmp_path / "start.log")
    except OctavoError:
        return
    json.dumps(found_plan.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("line", "odd"),
    [
        ("GPU KV cache size: 460,496 tokens", "GPU KV cache size: , tokens"),
        ("(0.92, 72.91 GiB)", "(0.9.2, 72.91 GiB)"),
        ("for 131,072 tokens per request: 3.51x", "for 0 tokens per request: 3.51x"),
        ("15.0 GiB memory", "9" * 400 + " GiB memory"),
    ],
)
def test_a_number_that_is_none_is_passed_over(tmp_path, line, odd):
    text = (LOGS / "vllm_0_30.log").read_text(encoding="utf-8")
    assert line in text
    (tmp_path / "start.log").write_text(text.replace(line, odd), encoding="utf-8")
    found = plan_for(question_from_words({"model": "llama-3-8b"}), calibrate_path=tmp_path / "start.log")
    assert found.engine_version == "0.30"
