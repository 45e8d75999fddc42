"""Start-up logs of other engines, in the line formats of their releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import InvalidParameterError
from octavo.planner.start_log import read_start_log
from octavo.units import GIB, MIB

LOGS = Path(__file__).parents[1] / "data" / "start_logs"


def read(name: str):
    return read_start_log((LOGS / f"{name}.log").read_text(encoding="utf-8"))


def stated(log) -> dict[str, object]:
    """What the log says, sizes in GiB to two digits."""
    names = (name for name in log.__slots__ if getattr(log, name) not in (None, False))
    return {
        name: round(getattr(log, name) / GIB, 2) if name.endswith("_bytes") else getattr(log, name) for name in names
    }


def test_the_first_vllm_printed_blocks_only():
    assert stated(read("vllm_0_2")) == {
        "engine": "vllm",
        "model": "meta-llama/Llama-2-13b-hf",
        "num_blocks": 1981,
        "tensor_parallel_size": 1,
    }


def test_vllm_0_6_4_printed_the_whole_peak_and_gib_as_gb():
    assert stated(read("vllm_0_6_4")) == {
        "engine": "vllm",
        "version": "0.6.4.post2",
        "visible_bytes": 191.98,
        "utilization": 0.98,
        "weight_bytes": 67.70,
        "activation_bytes": 19.09,  # 86.79 - 67.70
        "overhead_bytes": 6.07,
        "kv_pool_bytes": 95.28,
        "num_blocks": 19513,
        "max_concurrency": 9.53,
        "max_model_len": 32768,
        "max_num_seqs": 512,
        "tensor_parallel_size": 1,
    }


def test_vllm_0_6_5_printed_every_term_in_one_sentence():
    assert stated(read("vllm_0_6_5")) == {
        "engine": "vllm",
        "version": "0.6.5",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "visible_bytes": 23.58,
        "utilization": 0.9,
        "weight_bytes": 14.99,
        "activation_bytes": 2.07,
        "overhead_bytes": 0.35,
        "kv_pool_bytes": 3.81,
        "num_blocks": 1952,
        "max_concurrency": 1.56,
        "max_model_len": 20000,
        "max_num_batched_tokens": 2048,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "is_eager": True,
    }


def test_a_pool_below_zero_and_other_makers_blocks_are_read():
    log = read("vllm_0_7_unfit")
    assert log.weight_bytes == int(5.43 * GIB)
    assert log.kv_pool_bytes == int(-0.94 * GIB)
    assert log.overhead_bytes == int(-0.51 * GIB)
    assert (log.num_blocks, log.max_concurrency, log.max_model_len) == (0, 0.0, 4200)


def test_later_releases_tell_the_terms_only_in_debugging_lines():
    assert stated(read("vllm_0_10_debug")) == {
        "engine": "vllm",
        "version": "0.10.1.dev101+gabcdef012",
        "model": "Qwen/Qwen3-0.6B",
        "visible_bytes": 43.82,
        "utilization": 0.91,
        "weight_bytes": 2.32,
        "activation_bytes": 0.45,
        "overhead_bytes": 0.02,
        "kv_pool_bytes": 37.10,
        "pool_tokens": 347_296,
        "max_concurrency": 84.79,
        "max_model_len": 4096,
    }


def test_the_fullest_device_of_a_group_counts():
    log = read("vllm_0_19_tp2")
    assert log.kv_pool_bytes == int(63.84 * GIB)  # and not the other device's 63.86
    assert log.version == "0.19.0"
    assert (log.tensor_parallel_size, log.pipeline_parallel_size) == (2, 1)
    assert (log.pool_tokens, log.max_model_len, log.max_num_batched_tokens) == (2_390_592, 8192, 8192)
    assert log.graph_bytes == int(0.71 * GIB)
    assert log.visible_bytes is None and log.activation_bytes is None
    assert not log.is_eager


def test_estimated_graphs_count_where_they_are_taken_from_the_pool():
    log = read("vllm_0_27")
    assert log.version == "0.27.1"
    assert log.graph_bytes == int(0.36 * GIB)  # and not the 0.29 GiB that they took later
    assert (log.utilization, log.max_num_seqs) == (0.82, 16)
    assert log.kv_pool_bytes == int(6.87 * GIB)


def test_releases_since_0_10_sum_up_what_was_used():
    assert stated(read("vllm_0_11")) == {
        "engine": "vllm",
        "version": "0.11.0",
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "visible_bytes": 79.19,
        "utilization": 0.9,
        "weight_bytes": 14.08,
        "activation_bytes": 1.97,
        "overhead_bytes": 0.07,
        "graph_bytes": 0.67,
        "kv_pool_bytes": 55.15,
        "max_concurrency": 110.29,
        "max_model_len": 4096,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }


def test_the_newest_releases_print_weights_and_overhead_as_one():
    assert stated(read("vllm_0_30")) == {
        "engine": "vllm",
        "version": "0.30.0",
        "visible_bytes": 79.25,
        "utilization": 0.92,
        "weight_bytes": 15.0,
        "activation_bytes": 1.21,  # 1.44 - 0.23: the graphs are counted to the peak
        "overhead_bytes": 0.26,  # 15.26 - 15.0
        "graph_bytes": 0.23,
        "kv_pool_bytes": 56.21,
        "pool_tokens": 460_496,
        "max_concurrency": 3.51,
        "max_model_len": 131_072,
    }


def test_one_line_may_be_all_there_is():
    line = (LOGS / "vllm_0_11.log").read_text(encoding="utf-8").splitlines()[-1]
    log = read_start_log(line)
    assert (log.weight_bytes, log.kv_pool_bytes) == (int(14.08 * GIB), 59_212_694_937)
    profile = (LOGS / "vllm_0_10_debug.log").read_text(encoding="utf-8").splitlines()[5]
    log = read_start_log(f"vLLM\n{profile}")
    assert (log.weight_bytes, log.activation_bytes) == (int(2.32 * GIB), int(0.45 * GIB))


def test_sglang_prints_one_size_for_the_pools_of_a_windowed_model():
    log = read("sglang_windows")
    assert (log.kv_pool_bytes, log.weight_bytes) == (int(74.73 * GIB), int(15.56 * GIB))
    assert (log.block_size, log.utilization) == (256, 0.8)


def test_a_start_that_sglang_refused_tells_what_was_missing():
    assert read("sglang_refused").kv_pool_bytes == int(-3.51 * GIB)


def test_sglang_prints_keys_and_values_apart():
    assert stated(read("sglang_2025_03")) == {
        "engine": "sglang",
        "model": "Qwen/Qwen2.5-32B-Instruct",
        "visible_bytes": 21.63,
        "utilization": 0.85,
        "weight_bytes": 15.54,
        "graph_bytes": 0.34,
        "kv_pool_bytes": 2.84,
        "pool_tokens": 46_611,
        "max_num_seqs": 2049,
        "max_num_batched_tokens": 2048,
        "max_model_len": 32768,
        "tensor_parallel_size": 4,
    }


def test_a_draft_models_weights_are_not_the_models():
    log = read("sglang_2026_draft")
    assert log.weight_bytes == int(82.97 * GIB)
    assert log.visible_bytes == int(111.97 * GIB)
    assert log.kv_pool_bytes == int(3.66 * GIB)
    assert log.block_size == 64


def test_latent_caches_have_one_size():
    log = read("sglang_latent")
    assert (log.kv_pool_bytes, log.pool_tokens, log.max_model_len) == (int(43.67 * GIB), 975_424, 163_840)


def test_llama_cpp_says_what_lies_on_the_device():
    log = read("llama_cpp_2024")
    assert (log.engine, log.version) == ("llama.cpp", "b4240")
    assert log.weight_bytes == int(5049.71 * MIB)
    assert log.kv_pool_bytes == 640 * MIB
    assert log.activation_bytes == 162 * MIB
    assert (log.pool_tokens, log.max_model_len, log.max_num_batched_tokens) == (2048, 2048, 512)


def test_a_dry_run_of_llama_cpp_is_not_the_real_one():
    log = read("llama_cpp_2026")
    assert log.weight_bytes == int(8128.64 * MIB)
    assert log.kv_pool_bytes == 1088 * MIB
    assert log.activation_bytes == int(916.08 * MIB)
    assert log.max_model_len == 8192


def test_the_host_counts_where_there_is_no_device_and_both_caches_of_a_windowed_model_do():
    log = read("llama_cpp_windows")
    assert log.weight_bytes == int(4377.12 * MIB)
    assert log.kv_pool_bytes == (512 + 720) * MIB
    assert (log.pool_tokens, log.max_model_len, log.max_num_seqs) == (16384, 4096, 4)


@pytest.mark.parametrize("name", sorted(path.stem for path in LOGS.glob("*.log")))
@pytest.mark.parametrize("end", ["\r\n", "\n\x1b[0m"])
def test_other_line_ends_and_other_lines_do_not_matter(name, end):
    text = (LOGS / f"{name}.log").read_text(encoding="utf-8")
    noise = ["", "Loading safetensors checkpoint shards:  86% Completed | 12/14", "INFO: 127.0.0.1 GET /health 200"]
    assert read_start_log(end.join([*noise, *text.splitlines(), *noise])) == read(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "INFO 04-19 vLLM API server version 0.19.0\n",  # it began, and then nothing
        "Model loading took a while",
        "llama_context: constructing llama_context",
        "\x00\x01\x02",
    ],
)
def test_a_text_without_a_word_about_memory_is_refused(text):
    with pytest.raises(InvalidParameterError, match="no line about memory"):
        read_start_log(text)


def test_a_log_of_many_megabytes_is_read_in_a_moment():
    lines = "INFO 04-19 10:20:02 [metrics.py:1] Avg prompt throughput: 0.0 tokens/s, Running: 0 reqs\n" * 50_000
    log = read_start_log((LOGS / "vllm_0_19_tp2.log").read_text(encoding="utf-8") + lines)
    assert log == read("vllm_0_19_tp2")
