"""Every open value is decided, with its reason; what does not fit is refused, and the advice works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from octavo.config.cgroup import CpuQuota
from octavo.config.engine import OPTIONS, EngineConfig
from octavo.config.machine import Machine
from octavo.errors import CapacityError, InvalidParameterError
from octavo.models.program import Buffer, Embed, Linear, Program, SelectRows
from octavo.models.spec import KVGroup, ModelSpec, Rope
from octavo.planner.card import make_card
from octavo.planner.resolve import ModelFacts, resolve

MIB = 2**20
GIB = 2**30

MACHINE = Machine(
    total_bytes=32 * GIB,
    available_bytes=24 * GIB,
    available_because="MemAvailable",
    memory_limit=None,
    num_logical_cpus=8,
    num_physical_cores=4,
    cpu_quota=None,
    cpu_model="Test CPU",
    architecture="x86_64",
    isa_flags=("avx2",),
    resident_bytes=0,
)
SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    norm_eps=1e-5,
    rope=Rope(),
    tie_embeddings=True,
)
PROGRAM = Program(
    ops=(Embed(out="x", weight="embed"), SelectRows(x="x", out="last"), Linear(x="last", out="y", weights=("embed",))),
    buffers={
        "x": Buffer(width=64, rows="token"),
        "last": Buffer(width=64, rows="selected"),
        "y": Buffer(width=1024, rows="selected"),
    },
    logits="y",
)
MODEL = ModelFacts(spec=SPEC, program=PROGRAM, weight_bytes=100 * MIB, weights_as="q4_1, as stored")
BLOCK_BYTES = 16 * 22.5 * 1024  # SmolLM2's shape: 22.5 KiB per token


def plan(machine=MACHINE, model=MODEL, purpose="offline", **asked):
    return resolve(EngineConfig(**asked), machine, model, purpose=purpose)


def test_defaults_on_a_roomy_machine():
    """4 GiB is the least of 4 GiB, half of 24 GiB, and what 64 requests of 8,192 tokens take (11.3 GiB)."""
    resolved = plan()

    assert resolved.block_bytes == BLOCK_BYTES
    assert resolved.num_blocks == 4 * GIB // BLOCK_BYTES - 1
    assert resolved.kv_pool_bytes <= 4 * GIB < resolved.kv_pool_bytes + BLOCK_BYTES
    assert resolved.max_model_len == 8192
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (64, 512)
    assert (resolved.runner, resolved.threads, resolved.kv_cache_dtype) == ("native", 4, "f16")
    assert resolved.max_concurrency == pytest.approx(resolved.num_blocks / 512)


def test_serving_runs_fewer_requests_than_offline_work():
    assert plan(purpose="serving").max_num_seqs == 32


def test_every_open_value_is_decided_with_a_reason():
    resolved = plan()

    for option in OPTIONS:
        # Without a window, or with dense reading, there is nothing to decide.
        is_off = option.name in {"attention_window", "attention_sinks", "sparse_blocks"}
        if option.auto and not is_off and option.name not in {"seed", "memory", "utilization", "kv_cache_memory"}:
            assert resolved.reasons[option.name], option.name
    assert set(resolved.as_dict()["reasons"]) == set(resolved.reasons)


def test_asked_value_needs_no_reason():
    resolved = plan(max_num_seqs=3, threads=7, num_blocks=9, kv_cache_dtype="f32", runner="reference")

    assert (resolved.max_num_seqs, resolved.threads, resolved.num_blocks) == (3, 7, 9)
    assert not {"max_num_seqs", "threads", "num_blocks", "kv_cache_dtype", "runner"} & set(resolved.reasons)


def test_pool_takes_half_of_a_small_machine():
    """1 GiB under a cgroup: 1,024 - 100 weights - 65 overhead leave 858.7 MiB, and half of that is the pool's."""
    resolved = plan(machine=replace(MACHINE, available_bytes=GIB, available_because="cgroup limit 1.0 GiB"))

    room = GIB - resolved.weight_bytes - resolved.activation_bytes - resolved.overhead_bytes
    assert 0 <= room // 2 - resolved.kv_pool_bytes < resolved.block_bytes
    assert "half of" in resolved.reasons["num_blocks"]
    assert resolved.reasons["available_bytes"] == "cgroup limit 1.0 GiB"


def test_pool_is_no_larger_than_the_limits_can_use():
    """Two requests of 100 tokens hold 7 blocks each."""
    resolved = plan(max_num_seqs=2, max_model_len=100)

    assert resolved.num_blocks == 14
    assert resolved.max_concurrency == 2.0


def test_memory_is_shared_out_to_the_last_block():
    resolved = plan(memory=GIB)

    assert resolved.available_bytes == int(0.9 * GIB)
    free = make_card(resolved).parts[-1]
    assert free.name == "free"
    assert 0 <= free.num_bytes < resolved.block_bytes


def test_utilization_alone_shares_out_the_machine():
    resolved = plan(utilization=0.25, max_num_seqs=1000, max_num_batched_tokens=1000)

    assert resolved.available_bytes == 6 * GIB
    assert resolved.kv_pool_bytes > 4 * GIB


def test_what_the_process_already_holds_counts_to_its_overhead():
    grown = replace(MACHINE, available_bytes=MACHINE.available_bytes - 50 * MIB, resident_bytes=50 * MIB)

    assert plan(machine=grown).available_bytes == plan().available_bytes


def test_threads_stay_within_a_cpu_quota_rounded_down():
    def with_quota(cpus):
        return plan(machine=replace(MACHINE, cpu_quota=CpuQuota(cpus=cpus, path="/q")))

    assert with_quota(1.5).threads == 1
    assert with_quota(0.5).threads == 1
    assert with_quota(2.0).threads == 2
    assert "CPU quota of 1.5 (/q)" in with_quota(1.5).reasons["threads"]
    assert with_quota(16.0).threads == 4
    assert "physical cores" in with_quota(16.0).reasons["threads"]


def test_runner_falls_back_to_the_reference_with_the_reason():
    without = replace(MODEL, native_refusal="the native module is not built")

    assert plan(model=without).runner == "reference"
    assert "not built" in plan(model=without).reasons["runner"]
    assert plan(block_size=24).runner == "reference"
    with pytest.raises(InvalidParameterError, match="not built"):
        plan(model=without, runner="native")


def test_step_limits_follow_each_other():
    assert plan(max_num_batched_tokens=16).max_num_seqs == 16
    assert plan(max_num_seqs=2000).max_num_batched_tokens == 2000


def test_reserved_allocator_turns_prefix_caching_off_and_says_so():
    resolved = plan(kv_allocator="reserved")

    assert not resolved.enable_prefix_caching
    assert "cannot share" in resolved.reasons["enable_prefix_caching"]


def test_open_length_shrinks_to_what_the_pool_holds():
    resolved = plan(num_blocks=10)

    assert resolved.max_model_len == 160
    assert "10 blocks" in resolved.reasons["max_model_len"]
    assert resolved.max_concurrency == 1.0


def test_length_beyond_the_model_is_a_usage_error():
    with pytest.raises(InvalidParameterError, match=r"--max-model-len 8192"):
        plan(max_model_len=8193)


def test_a_sliding_window_takes_nothing_from_the_length_and_less_from_the_pool():
    windows = (KVGroup(layers=tuple(range(SPEC.num_layers)), window=512),)
    windowed = replace(MODEL, spec=replace(SPEC, sliding_window=512, kv_groups=windows))

    assert plan(model=windowed).max_model_len == SPEC.max_position
    # ceil((512 - 1 + 512 tokens of a step) / 16) + 1 blocks, however long the request is
    assert plan(model=windowed).max_request_blocks == 65
    assert plan(model=MODEL).max_request_blocks == SPEC.max_position // 16


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"num_blocks": 10, "max_model_len": 200}, id="length over counted pool"),
        pytest.param({"kv_cache_memory": 64 * MIB, "max_model_len": 4096}, id="length over sized pool"),
        pytest.param({"memory": 300 * MIB, "max_model_len": 8000}, id="length over memory"),
        pytest.param({"kv_cache_memory": 300_000}, id="pool below one block"),
        pytest.param({"kv_cache_memory": 100 * GIB}, id="pool above the machine"),
        pytest.param({"num_blocks": 10**6}, id="blocks above the machine"),
        pytest.param({"memory": 100 * MIB}, id="memory below the weights"),
        pytest.param({"memory": 100 * GIB}, id="memory above the machine"),
        pytest.param({"memory": 100 * MIB, "num_blocks": 5000}, id="memory below the weights, counted pool"),
        pytest.param({"memory": 100 * MIB, "max_model_len": 8000}, id="memory below the weights, long requests"),
        pytest.param({"memory": 100 * MIB, "kv_cache_memory": 5 * GIB}, id="memory below the weights, sized pool"),
        pytest.param({"memory": 100 * GIB, "num_blocks": 5000, "utilization": 0.5}, id="half of too much memory"),
        pytest.param({"kv_cache_memory": 1, "max_model_len": 8000}, id="pool below one block, long requests"),
    ],
)
def test_each_hint_of_a_refusal_works(asked):
    with pytest.raises(CapacityError) as caught:
        plan(**asked)

    assert caught.value.exit_code == 3
    fixes = [fix for hint in caught.value.hints if (fix := fix_of(hint))]
    assert fixes, caught.value.hints
    for fix in fixes:
        plan(**{**asked, **fix})


@given(
    available=st.integers(150 * MIB, 1 * GIB),
    asked=st.fixed_dictionaries(
        {},
        optional={
            "memory": st.integers(MIB, 2 * GIB),
            "utilization": st.floats(0.05, 1.0),
            "max_model_len": st.integers(1, 8192),
            "block_size": st.integers(1, 64),
        },
    ),
    pool=st.one_of(
        st.just({}),
        st.fixed_dictionaries({"kv_cache_memory": st.integers(1, 2 * GIB)}),
        st.fixed_dictionaries({"num_blocks": st.integers(1, 5000)}),
    ),
)
def test_each_hint_of_any_refusal_works_beside_all_else_that_was_asked(available, asked, pool):
    machine = replace(MACHINE, available_bytes=available)
    try:
        plan(machine=machine, **asked, **pool)
    except CapacityError as error:
        for hint in error.hints:
            if fix := fix_of(hint):
                plan(machine=machine, **{**asked, **pool, **fix})


@given(length=st.integers(1, 8192), pool_kib=st.integers(1, 200_000), block_size=st.sampled_from([8, 16, 32, 48]))
def test_suggested_length_starts_and_one_block_more_does_not(length, pool_kib, block_size):
    asked = {"kv_cache_memory": pool_kib * 1024, "block_size": block_size}
    try:
        plan(**asked, max_model_len=length)
    except CapacityError as error:
        suggested = next((fix for hint in error.hints if "max_model_len" in (fix := fix_of(hint))), None)
        assume(suggested is not None)
        longest = suggested["max_model_len"]
        assert longest < length
        assert plan(**asked, max_model_len=longest).max_model_len == longest
        with pytest.raises(CapacityError):
            plan(**asked, max_model_len=longest + 1)


@given(
    available=st.integers(MIB, 30 * GIB),
    asked=st.fixed_dictionaries(
        {},
        optional={
            "memory": st.integers(MIB, 30 * GIB),
            "utilization": st.floats(0.01, 1.0),
            "kv_cache_memory": st.integers(1, 30 * GIB),
            "max_model_len": st.integers(1, 8192),
            "max_num_seqs": st.integers(1, 512),
            "block_size": st.integers(1, 64),
        },
    ),
)
def test_what_is_let_through_fits_and_the_card_adds_up(available, asked):
    machine = replace(MACHINE, available_bytes=available)
    try:
        resolved = plan(machine=machine, **asked)
    except CapacityError as error:
        assert error.hints
        return

    card = make_card(resolved)
    assert sum(part.num_bytes for part in card.parts) == card.total_bytes <= available
    assert all(part.num_bytes >= 0 for part in card.parts)
    assert card.resident_limit_bytes + card.parts[-1].num_bytes == card.total_bytes
    assert resolved.num_blocks * resolved.block_size >= resolved.max_model_len >= 1
    assert resolved.max_concurrency >= 1.0


def test_card_shows_each_decided_value_with_its_reason():
    card = make_card(plan(max_num_seqs=5))

    shown = {line.name: line for line in card.lines}
    assert "max_num_seqs" not in shown
    assert shown["threads"].value == "4"
    assert shown["max_model_len"].value == "8,192 tokens"
    assert "360 KiB" in shown["num_blocks"].value
    assert card.as_dict()["memory"]["kv_pool_bytes"] == (card.num_blocks + 1) * card.block_bytes


def fix_of(hint: str) -> dict:
    """Read the option out of a hint such as `--max-model-len 160` is the longest."""
    found = re.search(r"`--([a-z-]+) (\S+)`", hint)
    if not found:
        return {}
    name, value = found[1].replace("-", "_"), found[2]
    return {name: value if "memory" in name else int(value)}


def test_layers_that_a_quantised_cache_skips_are_counted_and_passed_on():
    plain, skipping = (
        plan(num_blocks=9, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=each) for each in ("", "0,2")
    )

    assert skipping.kv_cache_dtype_skip_layers == (0, 2) and plain.kv_cache_dtype_skip_layers == ()
    assert skipping.block_bytes > plain.block_bytes


def test_a_skipped_layer_that_the_model_has_not_is_refused():
    with pytest.raises(InvalidParameterError, match="has no layer 4,000") as caught:
        plan(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=(1, 4000))
    assert caught.value.param == "kv_cache_dtype_skip_layers"


@pytest.mark.parametrize("dtype", ["auto", "f16", "f32"])
def test_layers_are_skipped_by_a_quantised_cache_only(dtype):
    with pytest.raises(InvalidParameterError, match="given with a cache of"):
        plan(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=(1,))


def test_an_attention_window_is_shown_with_its_price():
    card = make_card(plan(attention_window=512))

    shown = {line.name: line for line in card.lines}
    assert shown["attention_window"].value == "512 tokens" and "lossy" in shown["attention_window"].reason
    assert "from token 517 on" in shown["attention_window"].reason
    assert shown["attention_sinks"].value == "4 tokens"
    assert not {"attention_window", "attention_sinks"} & {line.name for line in make_card(plan()).lines}


def test_sinks_without_a_window_are_refused():
    with pytest.raises(InvalidParameterError, match="given without attention_window") as caught:
        plan(attention_sinks=4)
    assert caught.value.param == "attention_sinks"
    assert plan(**fix_of(caught.value.hints[0])).attention_window == 1024


def test_an_instruction_set_is_taken_where_the_machine_has_it_and_refused_where_it_has_not():
    able = replace(MACHINE, isa_flags=("avx2", "fma", "f16c"))

    assert resolve(EngineConfig(), able, MODEL).instruction_set == "auto"
    assert resolve(EngineConfig(instruction_set="avx2"), able, MODEL).instruction_set == "avx2"
    with pytest.raises(InvalidParameterError, match="this CPU lacks fma, f16c"):
        resolve(EngineConfig(instruction_set="avx2"), MACHINE, MODEL)
    assert resolve(EngineConfig(instruction_set="portable"), MACHINE, MODEL).instruction_set == "portable"
    with pytest.raises(InvalidParameterError, match="NumPy reference"):
        resolve(EngineConfig(instruction_set="portable", runner="reference"), able, MODEL)
