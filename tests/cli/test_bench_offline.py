"""`octavo bench offline`: the promised document, and counts that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.testing.tiny_models import TinyModel, write_hf_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def workload(tmp_path: Path) -> str:
    requests = [
        {"prompt_token_ids": [(7 * i + j) % 200 + 3 for j in range(20)], "max_tokens": 10 + i} for i in range(8)
    ]
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(requests))
    return str(path)


def test_the_document_has_the_promised_fields_and_forced_lengths(octavo, model: str, workload: str) -> None:
    ran = octavo("bench", "offline", model, "--workload", workload, "--max-model-len", "64", "--json")

    document = json.loads(ran.out)
    assert ran.code == 0 and document["schema"] == "octavo.bench.offline/1"
    promised = (
        "config num_requests prompt_tokens output_tokens wall_s output_tokens_per_s total_tokens_per_s startup_s"
        " hit_tokens preemptions recomputed_tokens peak_kv_usage_ratio kv_token_utilization_ratio max_running"
        " mean_running peak_rss_bytes ttft_s itl_s e2e_s"
    )
    assert set(promised.split()) <= set(document)
    assert (document["num_requests"], document["prompt_tokens"]) == (8, 160)
    assert document["output_tokens"] == sum(10 + i for i in range(8))
    for name in ("ttft_s", "itl_s", "e2e_s"):
        assert set(document[name]) == {"mean", "p50", "p90", "p99"}
        assert 0 < document[name]["p50"] <= document[name]["p99"]
    assert 0 < document["runner_s"] < document["wall_s"]


def test_reserved_and_paged_differ_where_they_should(octavo, model: str, workload: str) -> None:
    args = ("--workload", workload, "--max-model-len", "64", "--num-blocks", "12", "--json")
    paged, reserved = (
        json.loads(octavo("bench", "offline", model, *args, "--kv-allocator", allocator).out)
        for allocator in ("paged", "reserved")
    )

    assert paged["output_tokens"] == reserved["output_tokens"]
    assert reserved["max_running"] == 3 < paged["max_running"]
    assert reserved["kv_token_utilization_ratio"] < paged["kv_token_utilization_ratio"]
    assert reserved["preemptions"] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not a list of requests"),
        ("{", "not JSON"),
        ('[{"prompt_token_ids": [1], "max_tokens": 0}]', "request 0"),
        ('[{"prompt_token_ids": "abc", "max_tokens": 1}]', "prompt_token_ids"),
    ],
)
def test_a_bad_workload_is_refused_by_place(octavo, model: str, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)

    ran = octavo("bench", "offline", model, "--workload", str(path))

    assert ran.code == 2 and words in ran.err and "--workload" in ran.err


def test_a_missing_workload_is_named(octavo, model: str) -> None:
    ran = octavo("bench", "offline", model, "--workload", "nowhere.json")
    assert ran.code == 1 and "nowhere.json" in ran.err
