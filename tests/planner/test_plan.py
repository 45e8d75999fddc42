"""Plans for other engines: advice that works, levers that do what they say, and formulas people got wrong elsewhere."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CapacityError, InvalidParameterError, UnsupportedModelError
from octavo.llm.plan import plan_document, plan_for
from octavo.models.catalogue import find_model
from octavo.planner.advice import with_options
from octavo.planner.plan import Plan
from octavo.planner.question import PlanQuestion, question_from_words
from octavo.units import GIB, MIB

LOGS = Path(__file__).parents[1] / "data" / "start_logs"

FIELDS = """
    schema model parameters memory_bytes usable_memory_bytes weight_bytes activation_peak_bytes overhead_bytes
    headroom_bytes kv_pool_bytes kv_pool_bytes_low kv_pool_bytes_high kv_bytes_per_token kv_bytes_per_block block_size
    num_blocks pool_tokens max_model_len fits longest_fitting_len max_concurrency concurrency_at_lengths
    reserved_concurrency levers advice sources
"""


def plan(**asked: object) -> Plan:
    return plan_for(question(**asked))


def question(**asked: object) -> PlanQuestion:
    return question_from_words({name: str(value) for name, value in asked.items()})


def flags_as_words(flags: str) -> dict[str, str]:
    words = shlex.split(flags)
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


HOPEFUL = [
    {"model": "llama-3-8b", "device": "l4", "max_model_len": "64k"},
    {"model": "llama-3.1-8b", "device": "rtx4090"},
    {"model": "llama-3-70b", "device": "h100", "devices": 2, "utilization": 0.85, "max_model_len": "8k"},
    {"model": "llama-3.1-70b", "device": "a100-80gb", "tensor_parallel_size": 2},
    {"model": "qwen2.5-14b-instruct", "device": "a10g", "max_model_len": "4k"},
    {"model": "gemma-3-27b-it", "device": "a100-40gb"},
    {"model": "mixtral-8x7b", "device": "h100", "max_model_len": "32k"},
    {"model": "deepseek-v3", "device": "h200", "devices": 4, "max_model_len": "32k"},
    {"model": "qwen3-32b", "device": "l40s", "engine": "sglang", "devices": 2, "kv_cache_memory": "60GiB"},
    {"model": "qwen3-next-80b-a3b-instruct", "device": "h200"},
    {"model": "llama-3.1-8b", "memory": "16GiB", "engine": "vllm", "max_model_len": "8k"},
]


@pytest.mark.parametrize("asked", HOPEFUL, ids=lambda asked: f"{asked['model']} on {asked.get('device')}")
def test_every_change_that_is_advised_fits(asked):
    refused = plan(**asked)
    assert not refused.fits, "the case is meant not to fit"
    changes = [each for each in refused.advice if each.kind == "change"]
    assert changes

    for change in changes:
        again = plan_for(with_options(question(**asked), change.options))
        assert again.fits, change.flags
        assert again.max_concurrency >= 1
        assert plan_for(question_from_words({**{k: str(v) for k, v in asked.items()}, **change.options})).fits
    with pytest.raises(CapacityError) as caught:
        refused.check()
    assert caught.value.exit_code == 3
    assert changes[0].flags in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-2-9b", "deepseek-v2-lite", "qwen3-next-80b-a3b-instruct"])
def test_the_longest_that_fits_fits_and_a_block_more_does_not(engine, model):
    """Over budgets in small steps, refusals by a sliver among them."""
    weights = plan(model=model, memory="200GiB", engine=engine).weight_bytes
    num_limited = 0
    for step in range(6):
        memory = int((weights + 2.6 * GIB + step * 0.45 * GIB) / 0.88)
        asked = {"model": model, "memory": f"{memory}B", "engine": engine, "utilization": 0.88}
        found = plan(**asked, max_model_len="auto")
        assert found.max_model_len == found.longest_fitting_len
        assert found.fits == (found.longest_fitting_len >= 1)
        if not found.longest_fitting_len:
            continue
        fitting = plan(**asked, max_model_len=found.longest_fitting_len)
        # Other lengths change what an engine sets aside a little, so the pool is compared, not assumed.
        assert fitting.fits or fitting.kv_pool_bytes < found.kv_pool_bytes
        longer = found.longest_fitting_len + found.block_size
        if found.longest_fitting_len < 4096 or fitting.num_blocks < 100_000:
            more = plan(**asked, max_model_len=longer)
            if more.fits:
                assert found.max_concurrency > 1, "only the model's own limit stops a length that fits"
            else:
                num_limited += 1
    assert num_limited, "no budget of the sweep was limited by memory"


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-2-9b"])
def test_what_fits_is_monotone_in_the_length(model):
    lengths = (1, 256, 1024, 2048, 4096, 6000, 8192, 16384, 32768, 65536)
    fits = [plan(model=model, device="l4", kv_cache_dtype="fp8", max_model_len=each).fits for each in lengths]
    assert fits == sorted(fits, reverse=True)


@pytest.mark.parametrize("engine", ["octavo", "vllm", "sglang"])
@given(sizes=st.tuples(st.integers(1, 200_000), st.integers(1, 200_000)), model=st.sampled_from(["gemma-2-2b", "gpt2"]))
@settings(max_examples=25)
def test_more_memory_never_holds_less(engine, sizes, model):
    # Pinned, since a larger device gets larger steps from vLLM, and those do take more.
    asked = {"model": model, "engine": engine, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    less, more = (plan(**asked, memory=f"{size}MiB") for size in sorted(sizes))
    assert less.num_blocks <= more.num_blocks
    assert less.longest_fitting_len <= more.longest_fitting_len
    assert less.fits <= more.fits
    if less.max_model_len == more.max_model_len:
        assert less.max_concurrency <= more.max_concurrency


def test_a_budget_without_any_room_is_told_in_numbers():
    refused = plan(model="llama-3.1-70b", device="l4")
    assert (refused.num_blocks, refused.pool_tokens, refused.max_concurrency) == (0, 0, 0.0)
    assert refused.kv_pool_bytes == 0
    assert refused.headroom_bytes < 0
    assert not refused.levers
    assert refused.next_command == ""
    missing = refused.advice[0].text
    assert "GiB" in missing
    assert "does not fit by" in missing


def test_parts_add_up_and_the_interval_holds_the_pool():
    for asked in (*HOPEFUL, {"model": "llama-3-8b", "device": "h100"}):
        found = plan(**asked)
        parts = found.weight_bytes + found.activation_peak_bytes + found.overhead_bytes + found.kv_pool_bytes
        assert parts + found.headroom_bytes == found.memory_bytes
        assert found.kv_pool_bytes_low <= found.kv_pool_bytes <= found.kv_pool_bytes_high
        assert found.max_concurrency_low <= found.max_concurrency


def test_a_pool_that_may_turn_out_too_small_is_warned_of_with_a_length_that_is_safe():
    tight = plan(model="llama-3-8b", device="l4", max_model_len="32k")
    assert tight.fits
    assert tight.max_concurrency_low < 1 < tight.max_concurrency
    warning = next(each for each in tight.advice if each.kind == "warning")
    assert "GiB" in warning.text
    safe = plan_for(with_options(question(model="llama-3-8b", device="l4"), warning.options))
    assert safe.max_concurrency_low >= 1


# Formulas that other planners got wrong.


def test_latent_attention_keeps_one_vector_a_layer_on_every_rank():
    one = plan(model="deepseek-v3", device="b200", devices=8)
    other = plan(model="deepseek-v3", device="b200", devices=4, pipeline_parallel_size=1)
    assert one.kv_bytes_per_token == other.kv_bytes_per_token == 61 * (512 + 64) * 2


def test_fewer_heads_than_ranks_are_copied_not_divided():
    halves = [plan(model="qwen2.5-7b-instruct", device="h100", devices=each).kv_bytes_per_token for each in (1, 2, 4)]
    assert halves == [28 * 2 * 4 * 128 * 2, 28 * 2 * 2 * 128 * 2, 28 * 2 * 1 * 128 * 2]
    many = plan(model="llama-3-70b", device="h100", devices=16).kv_bytes_per_token
    assert many == plan(model="llama-3-70b", device="h100", devices=8).kv_bytes_per_token == 80 * 2 * 128 * 2


def test_a_head_is_as_wide_as_the_configuration_says():
    assert plan(model="qwen3-0.6b", device="l4").kv_bytes_per_token == 28 * 2 * 8 * 128 * 2


def test_windows_stop_growing():
    short, long = (
        plan(model="gemma-2-9b", device="h100", max_model_len=length, max_num_batched_tokens=2048)
        for length in (4096, 8192)
    )
    assert short.max_concurrency / long.max_concurrency < 1.9
    full = plan(model="llama-3-8b", device="h100", max_model_len=4096).max_concurrency
    assert full / plan(model="llama-3-8b", device="h100", max_model_len=8192).max_concurrency == pytest.approx(
        2, rel=0.05
    )


def test_a_pipeline_is_as_long_as_its_fullest_stage():
    whole = plan(model="llama-3.1-8b", device="h100", max_model_len="8k")
    halves = plan(model="llama-3.1-8b", device="h100", max_model_len="8k", pipeline_parallel_size=2)
    assert halves.num_devices == 2
    assert halves.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    assert halves.weight_bytes < 0.6 * whole.weight_bytes
    assert halves.scope == "one device of 2"


def test_unknown_architectures_and_odd_cuts_are_refused_not_guessed(tmp_path):
    config = {"architectures": ["SomethingNewForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="SomethingNew"):
        plan(model=str(tmp_path / "config.json"), device="h100")
    with pytest.raises(InvalidParameterError, match="heads"):
        plan(model="llama-3.2-3b", device="h100", devices=5)
    with pytest.raises(InvalidParameterError, match="devices"):
        plan(model="llama-3.2-3b", device="h100", devices=4, tensor_parallel_size=2)
    with pytest.raises(UnsupportedModelError):
        plan(model="deepseek-v3", engine="octavo", memory="900GiB")
    with pytest.raises(InvalidParameterError, match="Octavo does not run on"):
        plan(model="llama-3-8b", engine="octavo", device="h100")
    with pytest.raises(InvalidParameterError, match="device"):
        plan(model="llama-3-8b", engine="vllm")


@pytest.mark.parametrize("model", ["openai-community/gpt2", "facebook/opt-125m", "bigcode/starcoder"])
def test_no_engine_looks_positions_up_beyond_the_end_of_their_table(model):
    limit = plan(model=model, device="h100", max_model_len="auto").max_model_len
    assert plan(model=model, device="h100", max_model_len=limit).fits
    with pytest.raises(InvalidParameterError, match="table, which ends at"):
        plan(model=model, device="h100", max_model_len=limit + 1)
    assert plan(model="llama-2-7b", device="h100", max_model_len=4097).fits, "angles can go on"


def test_files_of_a_model_that_octavo_does_not_run_are_counted_by_their_headers(tmp_path):
    config = dict(find_model("microsoft/phi-2").config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_sizes = plan(model=str(tmp_path), engine="vllm", memory="24GiB")
    header = json.dumps({"w": {"dtype": "F16", "shape": [500, 1000, 1000], "data_offsets": [0, 10**9]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10**9)  # sparse
    by_headers = plan(model=str(tmp_path), engine="vllm", memory="24GiB")
    assert by_sizes.weight_bytes == pytest.approx(2 * by_sizes.parameters, rel=0.01)
    assert by_headers.weight_bytes == pytest.approx(10**9, rel=0.03)  # what an engine holds besides is in it
    assert "headers of 1 safetensors" in next(each.source for each in by_headers.sources if each.name == "weights")


def test_spellings_of_other_engines_mean_the_same():
    ours = plan(model="llama-3-8b", device="h100", max_model_len="8k", utilization=0.8, devices=2)
    vllm = {"max-seq-len": "8k", "gpu-memory-utilization": "0.8", "tp": "2"}
    sglang = {"context-length": "8k", "mem-fraction-static": "0.8", "tp-size": "2"}
    for words in (vllm, sglang):
        again = plan_for(question_from_words({"model-path": "llama-3-8b", "device": "h100", **words}))
        assert again.num_blocks == ours.num_blocks


def test_steps_too_large_for_a_device_do_not_fit_and_are_no_bug_of_ours():
    asked = {"model": "gpt2", "device": "a100-40gb", "engine": "sglang", "max_num_batched_tokens": "32k"}
    refused = plan(**asked)
    assert not refused.fits
    assert refused.usable_memory_bytes == 0


def test_without_graphs_nothing_is_set_aside_for_them():
    asked = {"model": "llama-3-8b", "device": "h100", "engine-version": "0.22"}
    assert plan(**asked, enforce_eager=True).overhead_bytes < plan(**asked).overhead_bytes


# Levers and targets.


def test_each_lever_does_what_the_same_options_do():
    asked = {"model": "llama-3.1-8b", "device": "h100", "max_model_len": "16k", "lengths": "1155:211"}
    base = plan(**asked)
    made = [each for each in base.levers if each.options and "shared" not in each.options]
    assert {each.options.split()[0] for each in made} >= {"--kv-cache-dtype", "--max-model-len", "--devices"}

    for lever in made:
        again = plan(**{**asked, **{k.replace("-", "_"): v for k, v in flags_as_words(lever.options).items()}})
        assert again.max_concurrency == pytest.approx(lever.max_concurrency), lever.options
        assert again.concurrency_at_lengths == pytest.approx(lever.concurrency_at_lengths), lever.options
        assert again.kv_bytes_per_token == lever.kv_bytes_per_token
        assert lever.gain_ratio == pytest.approx(lever.max_concurrency / base.max_concurrency)


def test_a_lever_of_octavo_brings_the_seats_that_it_fills():
    """Octavo makes no pool that its seats cannot fill: with 32 of them every smaller cache would seem to hold 32."""
    asked = {"model": "smollm2-135m", "engine": "octavo", "memory": "8GiB"}
    base = plan(**asked)
    made = [each for each in base.levers if each.options and "shared" not in each.options]
    assert 1 < base.max_concurrency <= base.max_num_seqs

    assert any("--max-num-seqs" in each.options for each in made)
    for lever in made:
        again = plan(**asked, **{k.replace("-", "_"): v for k, v in flags_as_words(lever.options).items()})
        assert again.max_concurrency == pytest.approx(lever.max_concurrency), lever.options
        assert again.max_concurrency < again.max_num_seqs, lever.options
    few = plan(**asked, max_num_seqs=16)
    assert not any("--max-num-seqs" in each.options for each in few.levers), "seats that were asked for stay"


def test_heads_show_what_grouping_saves():
    base = plan(model="llama-3-8b", device="h100", max_model_len="8k")
    by_name = {each.name: each for each in base.levers}
    assert by_name["all 32 heads with own keys and values"].kv_bytes_per_token == 4 * base.kv_bytes_per_token
    assert by_name["one key-value head for all heads"].kv_bytes_per_token == base.kv_bytes_per_token // 8
    assert all(each.is_hypothetical for each in base.levers if "head" in each.name)


def test_a_shared_prefix_is_held_once():
    base = plan(model="llama-3-8b", device="h100", lengths="1024:16", max_model_len="8k")
    shared = plan(model="llama-3-8b", device="h100", lengths="1024:16", max_model_len="8k", shared_prefix=1008)
    blocks = shared.num_blocks
    assert base.concurrency_at_lengths == pytest.approx(blocks / 65)
    assert shared.concurrency_at_lengths == pytest.approx((blocks - 63) / 2)


def test_reservations_ignore_windows_and_fit_only_what_they_hold():
    asked = {"model": "gemma-3-12b-it", "device": "a100-80gb"}
    paged, reserved = plan(**asked), plan(**asked, kv_allocator="reserved", max_model_len="auto")
    assert paged.longest_fitting_len > reserved.longest_fitting_len >= 1
    assert reserved.max_concurrency == 1
    assert not plan(**asked, kv_allocator="reserved").fits


def test_prompts_may_be_all_prefix_and_no_more():
    asked = {"model": "llama-3-8b", "device": "h100", "lengths": "100:100", "max_model_len": "8k"}
    assert plan(**asked, shared_prefix=100).concurrency_at_lengths > plan(**asked).concurrency_at_lengths
    with pytest.raises(InvalidParameterError, match="more than any prompt has"):
        plan(**asked, shared_prefix=101)


def test_a_reservation_holds_fewer_than_blocks_on_demand():
    asked = {"model": "llama-3-8b", "device": "h100", "max_model_len": "8k", "lengths": "1155:211"}
    paged = plan(**asked)
    reserved = plan(**asked, kv_allocator="reserved")
    assert paged.reserved_concurrency == int(paged.max_concurrency)
    assert reserved.concurrency_at_lengths == reserved.max_concurrency == paged.reserved_concurrency
    assert paged.concurrency_at_lengths > 5 * reserved.concurrency_at_lengths


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "llama-3-8b", "device": "l4", "max_model_len": "8k", "lengths": "1155:211"},
        {"model": "llama-3.1-70b", "device": "h100", "devices": 4, "max_model_len": "16k"},
        {"model": "smollm2-135m", "memory": "1GiB", "max_model_len": "2k"},
        {"model": "llama-3.2-1b", "device": "desktop-ddr5", "max_model_len": "8k", "shared_prefix": 1024},
    ],
    ids=lambda asked: asked["model"],
)
def test_what_is_said_to_hold_a_number_of_requests_holds_it(asked):
    target = 64
    found = plan(**asked, target_concurrency=target)
    assert found.targets

    for answer in found.targets:
        if answer.num_copies > 1:
            assert int(found.concurrency_at_lengths or found.max_concurrency) * answer.num_copies >= target
            continue
        again = plan_for(with_options(question(**asked), answer.options))
        holds = again.concurrency_at_lengths
        if holds is None:
            lever = next((each for each in again.levers if "shared" in each.options), None)
            holds = lever.max_concurrency if asked.get("shared_prefix") and lever else again.max_concurrency
        assert again.fits
        assert holds >= target, answer.flags
        assert holds == pytest.approx(answer.concurrency)


def test_the_least_memory_for_a_number_of_requests_is_the_least():
    asked = {"model": "smollm2-135m", "memory": "1GiB", "max_model_len": "2k", "max_num_seqs": 64}
    (answer, *_) = plan(**asked, target_concurrency=50).targets
    enough = int(answer.options["memory"].removesuffix("MiB"))
    less = plan(**{**asked, "memory": f"{enough - 2}MiB"})
    assert less.max_concurrency < 50 <= plan(**{**asked, "memory": f"{enough}MiB"}).max_concurrency


def test_the_lower_of_two_ceilings_binds():
    asked = {"model": "llama-3-8b", "device": "h100", "max_model_len": "8k", "lengths": "1155:211"}
    slow, fast = plan(**asked, itl="200ms").ceilings, plan(**asked, itl="8ms").ceilings
    assert (slow.binds, fast.binds) == ("memory", "device")
    assert fast.device_requests < fast.memory_requests < slow.device_requests
    assert slow.context_tokens == 1261  # 1,155 and half of 212, the mean over 211 steps
    # One request alone reads the weights: 16 GB at 80 % of 3.35 TB/s.
    assert plan(**asked, itl="5ms").ceilings.device_requests == 0
    assert plan(model="llama-3-8b", memory="80GiB", engine="vllm").ceilings is None


@pytest.mark.parametrize(
    ("model", "num_read"), [("llama-3-8b", 8030261248 - 128256 * 4096), ("llama-3.2-1b", 1235814400)]
)
def test_a_step_reads_every_weight_once_and_looks_an_untied_embedding_up(model, num_read):
    asked = question(model=model, device="h100", lengths="1:1", max_num_seqs=1)
    found = plan_for(asked)
    lone = plan_for(with_options(asked, {"num_blocks": "1"})).ceilings
    assert lone.memory_requests == 1
    seconds = (2 * num_read + found.kv_bytes_per_block) / (0.8 * 3.35e12)
    assert lone.memory_step_s == pytest.approx(seconds, rel=0.01)


def test_measured_speed_is_a_ceiling_for_octavo(tmp_path):
    measured = {
        "schema": "octavo.bench.kernels/1",
        "limits": {"memory_read_gb_per_s": 20.0, "matrix_product_gflop_per_s": 150.0},
    }
    (tmp_path / "speed.json").write_text(json.dumps(measured))
    asked = question(model="smollm2-135m", memory="4GiB", itl="50ms", lengths="500:100", max_model_len=8192)
    found = plan_for(asked, calibrate_path=tmp_path / "speed.json").ceilings
    assert found.label == "measured"
    assert found.binds == "device"
    assert 0 < found.device_requests < found.memory_requests
    assert plan_for(asked).ceilings is None


def test_a_start_up_log_corrects_the_plan_and_says_how_far_off_the_rule_was():
    """Two devices, which logged 63.84 and 63.86 GiB for the pool, and 291.82 requests of 8,192 tokens."""
    asked = question(model="qwen2.5-7b-instruct", device="h100")
    found = plan_for(asked, calibrate_path=LOGS / "vllm_0_19_tp2.log")

    assert (found.engine, found.engine_version, found.num_devices, found.max_model_len) == ("vllm", "0.19", 2, 8192)
    terms = {each.term: each for each in found.calibration}
    assert terms["KV pool"].logged_bytes == int(63.84 * GIB)
    assert terms["KV pool"].difference_ratio != 0
    assert found.kv_pool_bytes == pytest.approx(63.84 * GIB, rel=1e-3)
    assert found.max_concurrency == pytest.approx(291.82, rel=2e-3)
    assert any("calibrated" in each.source for each in found.sources)
    assert found.kv_pool_bytes_high - found.kv_pool_bytes_low < 0.5 * GIB

    longer = plan_for(with_options(asked, {"max_model_len": "16384"}), calibrate_path=LOGS / "vllm_0_19_tp2.log")
    assert longer.max_concurrency == pytest.approx(found.max_concurrency / 2, rel=1e-2)
    with pytest.raises(InvalidParameterError, match="28 layers against 80"):
        plan_for(question(model="llama-3-70b", device="h100"), calibrate_path=LOGS / "vllm_0_19_tp2.log")
    with pytest.raises(InvalidParameterError, match=r"llama\.cpp"):
        plan_for(question(model="llama-3-8b", device="h100"), calibrate_path=LOGS / "llama_cpp_2026.log")
    with pytest.raises(InvalidParameterError, match="one of vllm"):
        plan_for(with_options(asked, {"engine": "sglang"}), calibrate_path=LOGS / "vllm_0_19_tp2.log")


RUNS = json.loads((LOGS.parent / "engine_budget" / "vllm_runs.json").read_text(encoding="utf-8"))
PACKED_AS = {"16-bit": "auto", "mxfp4": "auto", "moe_wna16": "awq"}


def test_whole_plans_of_controlled_starts_are_off_by_less_than_a_percent_on_average():
    """From configuration and settings alone, as a person would ask: the pool within 6 % at worst, 1 % on average."""
    errors, inside = {}, 0
    for row in RUNS:
        words = {
            "model": row["model"],
            "engine": "vllm",
            "engine-version": row["version"],
            "weight-dtype": PACKED_AS.get(row["weights_as"], row["weights_as"]),
            "memory": f"{int(row['device_gib'] * GIB)}B",
            "utilization": row["utilization"],
            "max-model-len": row["max_model_len"],
            "max-num-seqs": row["max_num_seqs"],
            "max-num-batched-tokens": row["max_num_batched_tokens"],
            "tensor-parallel-size": row["tensor_parallel_size"],
        }
        found = plan_for(question_from_words({name: value for name, value in words.items() if value is not None}))
        real = row["kv_pool_gib"] * GIB
        inside += found.kv_pool_bytes_low - 0.006 * GIB <= real <= found.kv_pool_bytes_high + 0.006 * GIB
        if row["is_controlled"]:
            errors[f"{row['model']} x {row['tensor_parallel_size']}"] = found.kv_pool_bytes / real - 1
    assert len(errors) >= 25
    assert sum(map(abs, errors.values())) / len(errors) < 0.01
    assert max(map(abs, errors.values())) < 0.06
    assert inside >= 0.95 * len(RUNS)


# The document.


def test_the_document_has_every_promised_field_and_is_json():
    found = plan(model="llama-3-70b", device="h100-80gb", devices=4, max_model_len="32k", lengths="1155:211")
    document = found.as_dict()
    assert document["schema"] == "octavo.plan/1"
    assert set(FIELDS.split()) <= set(document)
    assert json.loads(json.dumps(document)) == document
    assert document["scope"] == "one device of 4"
    assert document["engine"] == "vllm"
    assert document["engine_because"]
    words = {
        "model": "llama-3-70b",
        "device": "h100-80gb",
        "devices": "4",
        "max-model-len": "32k",
        "lengths": "1155:211",
    }
    assert plan_document(words) == document


def test_every_source_line_names_its_source():
    found = plan(model="llama-3-70b", device="h100-80gb", devices=4)
    assert {each.name for each in found.sources} >= {
        "model",
        "memory",
        "weights",
        "activation peak",
        "overhead",
        "KV pool",
    }
    assert all(each.source for each in found.sources)


def test_more_memory_than_seats_can_use_is_told():
    roomy = plan(model="llama-3-8b", device="h100", max_model_len=2048, max_num_seqs=16)
    note = next(each for each in roomy.advice if each.options)
    less = plan_for(with_options(question(model="llama-3-8b", device="h100", max_model_len=2048), note.options))
    assert less.kv_pool_bytes < roomy.kv_pool_bytes
    assert less.max_concurrency >= 16
    assert less.kv_pool_bytes % MIB == 0


def test_layers_that_are_skipped_cost_their_own_bytes_in_their_own_group():
    """Gemma 2 2B: 13 sliding layers, the first among them, and 13 full ones, each of 4 heads of 256."""
    coded, plain = 4 * 2 * (256 + 2), 4 * 2 * 256 * 2  # codes of a byte and a scale of two, or 16 bits
    asked = {"model": "gemma-2-2b", "memory": "16GiB", "kv_cache_dtype": "int8", "max_model_len": 8192}

    def token_bytes(**more: object) -> dict[str, int]:
        found = plan_for(question(**asked, **more))
        assert found.kv_bytes_per_token == sum(group.token_bytes for group in found.groups)
        return {group.name.split()[0]: group.token_bytes for group in found.groups}

    assert token_bytes() == {"sliding": 13 * coded, "full": 13 * coded}
    skipped = token_bytes(kv_cache_dtype_skip_layers="0,1,2")
    assert skipped == {"sliding": 11 * coded + 2 * plain, "full": 12 * coded + plain}


OWN = (
    {"attention_window": 1024},
    {"attention_sinks": 4},
    {"sparse_blocks": 8},
    {"kv_cache_dtype_skip_layers": "0,1"},
    {"threads": 4},
    {"runner": "reference"},
    {"purpose": "offline"},
    {"kv_prefault": "true"},
)


@pytest.mark.parametrize("engine", ["auto", "vllm", "sglang"])
@pytest.mark.parametrize("asked", OWN, ids=lambda asked: next(iter(asked)))
def test_what_only_octavo_can_do_is_not_left_out_in_silence(asked, engine):
    (name,) = asked
    with pytest.raises(InvalidParameterError, match="has no such option") as caught:
        plan_for(question(model="llama-3-8b", device="h100-80gb", engine=engine, **asked))
    assert caught.value.param == name
    assert f"leave out --{name.replace('_', '-')}" in caught.value.hints


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_kv_dtype_that_an_engine_lacks_gets_one_that_it_has(dtype):
    with pytest.raises(InvalidParameterError, match=f"'{dtype}' is not a KV dtype of vllm") as caught:
        plan_for(question(model="llama-3-8b", device="h100-80gb", kv_cache_dtype=dtype))
    assert caught.value.hints == ("`--kv-cache-dtype fp8`",)


def test_octavo_refuses_ways_to_pack_that_only_others_have():
    with pytest.raises(InvalidParameterError, match="awq is for other engines"):
        plan_for(question(model="smollm2-135m", weight_dtype="awq", memory="1GiB"))
    with pytest.raises(InvalidParameterError, match="'fp8_e5m2' is not available"):
        plan_for(question(model="smollm2-135m", kv_cache_dtype="fp8_e5m2", memory="1GiB"))
    other = plan_for(question(model="llama-3-8b", device="h100-80gb", kv_cache_dtype="fp8_e5m2"))
    assert "--kv-cache-dtype fp8_e5m2" in other.next_command


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"weight_dtype": "bf16", "seed": 3}, ("vllm serve", "--dtype bfloat16", "--seed 3")),
        ({"weight_dtype": "fp8"}, ("--quantization fp8",)),
        ({"weight_dtype": "bnb-nf4"}, ("--quantization bitsandbytes",)),
        (
            {"engine": "sglang", "weight_dtype": "f16", "kv_cache_memory": "20GiB", "enable_prefix_caching": "false"},
            ("--dtype float16", "--max-total-tokens 163839", "--disable-radix-cache"),
        ),
    ],
    ids=str,
)
def test_the_next_command_says_all_that_was_asked(asked, words):
    found = plan_for(question(model="llama-3-8b", device="h100-80gb", **asked))
    assert all(word in found.next_command for word in words), found.next_command


@pytest.mark.parametrize("dtype", ["awq", "gptq", "int4", "q4_k"])
def test_weights_that_have_to_be_packed_already_are_said_to_be_and_no_command_is_made_up(dtype):
    found = plan_for(question(model="llama-3-8b", device="h100-80gb", weight_dtype=dtype))
    assert not found.next_command
    assert any(f"packed as {dtype}" in each.text for each in found.advice)
    published = plan_for(question(model="gpt-oss-20b", device="h100-80gb", weight_dtype="mxfp4"))
    assert published.next_command.startswith("vllm serve openai/gpt-oss-20b")


@pytest.mark.parametrize(
    ("asked", "words", "hint"),
    [
        ({"device": "l4", "lengths": "1155:0"}, "no prompt:output length", "`--lengths 1155:211`"),
        ({"device": "h100", "devices": 3}, "32 heads cannot be shared", "`--devices 2`"),
        ({"device": "h100", "devices": 6, "pipeline_parallel_size": 2}, "shared equally by 3", "`--devices 4`"),
        ({"device": "h100", "devices": 0}, "is not a count", "`--devices 8`"),
        ({"device": "l4", "block_size": 0}, "is not a count", "`--block-size 16`"),
        ({"device": "l4", "shared_prefix": 8192}, "more than any prompt has", "`--shared-prefix 8191`"),
        (
            {"device": "l4", "shared_prefix": 2000, "lengths": "100:10,1155:211"},
            "more than any prompt has",
            "`--shared-prefix 1155`",
        ),
        ({"device": "l4", "itl": "61min"}, "is no limit", "leave out --itl"),
        ({"device": "l4", "max_num_batched_tokens": 8, "max_num_seqs": 64}, "is less than", "`--max-num-seqs 8`"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_a_hint_that_works(asked, words, hint):
    with pytest.raises(InvalidParameterError, match=words) as caught:
        plan_for(question(model="llama-3-8b", **asked))
    assert any(hint in each for each in caught.value.hints), caught.value.hints
    if hint.startswith("`--"):
        name, _, value = hint.strip("`").removeprefix("--").partition(" ")
        plan_for(question(model="llama-3-8b", **{**asked, name.replace("-", "_"): value}))


@pytest.mark.parametrize("other", [{"enable_prefix_caching": "false"}, {"kv_allocator": "reserved"}])
def test_a_prefix_that_nothing_shares_is_refused(other):
    with pytest.raises(InvalidParameterError) as caught:
        plan_for(question(model="llama-3-8b", device="l4", shared_prefix=1024, **other))
    assert caught.value.param == "shared_prefix"


def test_a_target_counts_in_a_check():
    asked = {"model": "llama-3-8b", "device": "l4", "max_model_len": 8192}
    assert plan_for(question(**asked)).holds_target is None
    enough = plan_for(question(**asked, target_concurrency=4))
    assert enough.holds_target and enough.is_as_asked
    enough.check()
    for more in ({"target_concurrency": 64}, {"target_concurrency": 4, "max_num_seqs": 2}):
        short = plan_for(question(**asked, **more))
        assert short.fits and short.holds_target is False and not short.is_as_asked
        with pytest.raises(CapacityError, match="does not hold") as caught:
            short.check()
        assert caught.value.hints
        for hint in caught.value.hints:
            words = shlex.split(hint.strip("`"))
            pairs = zip(words[::2], words[1::2], strict=True)
            changes = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}
            assert plan_for(question(**{**asked, **more, **changes})).holds_target


@pytest.mark.parametrize("limits", ["NaN, 1", "1e400, 1", "-5, 1", "0, 1", '"20", 1', "true, 1", "null, 1", "20, 1e12"])
def test_a_speed_that_no_machine_has_is_refused(limits, tmp_path):
    read, multiplied = limits.split(", ")
    (tmp_path / "speed.json").write_text(
        f'{{"schema": "octavo.bench.kernels/1", "limits": {{"memory_read_gb_per_s": {read},'
        f' "matrix_product_gflop_per_s": {multiplied}}}}}'
    )
    with pytest.raises(InvalidParameterError, match="holds no measured speed") as caught:
        plan_for(question(model="smollm2-135m", memory="1GiB"), calibrate_path=tmp_path / "speed.json")
    assert "octavo bench kernels --json" in caught.value.hints[0]


def test_another_document_of_octavo_is_told_from_a_log(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"schema": "octavo.plan/1"}))
    with pytest.raises(InvalidParameterError, match="holds no measured speed") as caught:
        plan_for(question(model="smollm2-135m", memory="1GiB"), calibrate_path=tmp_path / "plan.json")
    assert "it is 'octavo.plan/1'" in caught.value.because


@pytest.mark.parametrize("asked", [{"device": "h100"}, {"memory": "24GiB", "engine": "vllm"}])
def test_the_speed_of_a_cpu_is_not_taken_for_a_gpu(asked, tmp_path):
    measured = {
        "schema": "octavo.bench.kernels/1",
        "limits": {"memory_read_gb_per_s": 20.0, "matrix_product_gflop_per_s": 150.0},
    }
    (tmp_path / "speed.json").write_text(json.dumps(measured))
    with pytest.raises(InvalidParameterError, match="holds a CPU's speed"):
        plan_for(question(model="llama-3-8b", itl="50ms", **asked), calibrate_path=tmp_path / "speed.json")


def test_a_log_as_some_shells_write_it_is_read(tmp_path):
    text = (LOGS / "vllm_0_30.log").read_text(encoding="utf-8")
    (tmp_path / "start.log").write_text(text.replace("\n", "\r\n"), encoding="utf-16")
    asked = question(model="llama-3-8b")
    there = plan_for(asked, calibrate_path=LOGS / "vllm_0_30.log")
    assert plan_for(asked, calibrate_path=tmp_path / "start.log").kv_pool_bytes == there.kv_pool_bytes


def test_a_log_of_a_device_without_memory_asks_for_the_device(tmp_path):
    text = (LOGS / "vllm_0_30.log").read_text(encoding="utf-8")
    (tmp_path / "start.log").write_text(text.replace("/79.25 GiB", "/0.0 GiB"))
    with pytest.raises(InvalidParameterError, match="does not say how much memory") as caught:
        plan_for(question(model="llama-3-8b"), calibrate_path=tmp_path / "start.log")
    assert "--device" in caught.value.hints[0]


def test_what_a_calibrated_plan_advises_can_be_asked_with_the_same_log():
    """The log does not say how many devices there were, but its cache does: one."""
    log = LOGS / "vllm_0_30.log"
    asked = {"model": "llama-3-8b", "device": "l4", "max_model_len": "128k", "target_concurrency": 2}
    found = plan_for(question(**asked), calibrate_path=log)
    assert not found.fits
    ways = [each.options for each in found.advice if each.options] + [each.options for each in found.targets]
    levers = [
        dict([each.options.removeprefix("--").replace("-", "_").split(" ")]) for each in found.levers if each.options
    ]
    assert levers and len(ways) > 2
    assert not any("devices" in options and "device" not in options for options in [*ways, *levers])
    for options in [*ways, *levers]:
        plan_for(question(**{**asked, **options}), calibrate_path=log)


def test_levers_keep_to_prompts_that_there_are():
    short = plan_for(question(model="llama-3-8b", device="l4", lengths="500:100"))
    assert any(each.options == "--shared-prefix 500" for each in short.levers)
    common = plan_for(question(model="llama-3-8b", device="l4", shared_prefix=4000))
    assert not any(each.options.startswith("--max-model-len") for each in common.levers)
    with pytest.raises(InvalidParameterError, match="more than any prompt has") as caught:
        plan_for(question(model="llama-3-8b", device="l4", shared_prefix=4000, max_model_len=4000))
    assert caught.value.hints == ("`--shared-prefix 3999`",)


@pytest.mark.parametrize(
    ("asked", "words", "pool"),
    [
        ({"kv_cache_memory": "900MiB"}, "needs 900 MiB, 736 MiB available", 900 * MIB),
        ({"kv_cache_memory": "10GiB"}, "needs 10.0 GiB, 736 MiB available", 10 * GIB),
        ({"num_blocks": 5000}, "a KV pool of 5,000 blocks needs 1.7 GiB", 5001 * 16 * 23040),
        ({"kv_cache_memory": "400KiB"}, "needs at least 720 KiB", 400 * 1024),
    ],
    ids=str,
)
def test_a_pool_that_was_asked_and_does_not_fit_is_what_is_shown_and_what_is_changed(asked, words, pool):
    """SmolLM2-135M: a block of 16 tokens takes 30 layers x 2 x 3 heads x 64 x 2 B x 16 = 360 KiB."""
    whole = {"model": "smollm2-135m", "memory": "1GiB", **asked}
    found = plan(**whole)
    assert not found.fits and found.num_blocks == 0
    assert found.kv_pool_bytes == pool
    parts = found.weight_bytes + found.activation_peak_bytes + found.overhead_bytes + found.kv_pool_bytes
    assert parts + found.headroom_bytes == found.memory_bytes
    warning = next(each.text for each in found.advice if each.kind == "warning")
    assert words in warning
    changes = [each.options for each in found.advice if each.kind == "change"]
    assert any(next(iter(asked)) in options for options in changes)
    for options in changes:
        assert plan(**{**whole, **options}).fits


def test_a_model_that_octavo_does_not_run_is_said_to_be_for_others():
    with pytest.raises(UnsupportedModelError, match="GptOssForCausalLM") as caught:
        plan(model="gpt-oss-20b")
    assert "--device h100-80gb" in caught.value.hints[-1]
    assert plan(model="gpt-oss-20b", device="h100-80gb").fits
