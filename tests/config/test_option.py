"""Reading values as people write them."""

from __future__ import annotations

import re

import pytest

from octavo.config.engine import OPTIONS, EngineConfig, find_option
from octavo.errors import InvalidParameterError


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("max_model_len", "32k", 32768),
        ("max_model_len", 4096, 4096),
        ("kv_cache_memory", "1.5GiB", 3 * 2**29),
        ("kv_cache_memory", 2**30, 2**30),
        ("kv_cache_dtype", "bfloat16", "bf16"),
        ("kv_cache_dtype", "fp8", "fp8_e4m3"),
        ("kv_cache_dtype", "F32", "f32"),
        ("weight_dtype", "half", "f16"),
        ("utilization", "0.85", 0.85),
        ("utilization", 1, 1.0),
        ("kv_prefault", "yes", True),
        ("kv_prefault", "0", False),
        ("seed", "-3", -3),
    ],
)
def test_value_is_read_as_a_person_writes_it(name, given, expected):
    option = find_option(name)

    assert option.read(given, param=name) == expected
    assert getattr(EngineConfig(**{name: given}), name) == expected


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("block_size", 0, "0 is not"),
        ("block_size", "-16", "'-16' is not a count"),
        ("block_size", True, "True is not"),
        ("block_size", "16.5", "'16.5' is not a count"),
        ("max_num_seqs", "many", "'many' is not a count"),
        ("kv_cache_memory", "24", "'24' is not a size"),
        ("kv_cache_memory", "0GiB", "less than one byte"),
        ("kv_cache_memory", -5, "less than one byte"),
        ("utilization", "0", "above 0 and at most 1"),
        ("utilization", "90%", "above 0 and at most 1"),
        ("utilization", "nan", "above 0 and at most 1"),
        ("utilization", 1.01, "above 0 and at most 1"),
        ("kv_allocator", "pagd", "did you mean 'paged'?"),
        ("kv_cache_dtype", "fp8_e5m2", "not available yet"),
        ("kv_cache_dtype_skip_layers", 3, "not a list of whole numbers"),
        ("kv_cache_dtype_skip_layers", "0,,1", "'' is not a whole number"),
        ("kv_cache_dtype_skip_layers", [0, -1], "-1 is not a whole number"),
        ("kv_prefault", "maybe", "neither true nor false"),
        ("seed", 2**63, "is not a whole number"),
        ("seed", "0x10", "is not a whole number"),
        ("model", "  ", "non-empty"),
    ],
)
def test_bad_value_is_refused_with_what_is_allowed(name, given, named):
    with pytest.raises(InvalidParameterError) as caught:
        EngineConfig(**{name: given})

    assert caught.value.param == name
    assert caught.value.exit_code == 2
    assert named in str(caught.value)


def test_spelling_that_names_bytes_takes_a_bare_number():
    option = find_option("kv_cache_memory_bytes")

    assert option.name == "kv_cache_memory"
    assert option.read("4294967296", param="kv_cache_memory_bytes") == 4 * 2**30
    assert option.read("4294967296", param="--kv-cache-memory-bytes") == 4 * 2**30
    with pytest.raises(InvalidParameterError, match="not a size"):
        option.read("4294967296", param="kv_cache_memory")


def test_pool_size_cannot_be_asked_twice():
    with pytest.raises(InvalidParameterError, match="both set the size"):
        EngineConfig(num_blocks=10, kv_cache_memory=2**30)


def test_step_must_hold_a_token_for_each_request():
    EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)

    with pytest.raises(InvalidParameterError, match="7 is less than max_num_seqs = 8"):
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=7)


def test_native_runner_refuses_blocks_that_are_no_multiple_of_its_tile():
    EngineConfig(runner="reference", block_size=24)

    with pytest.raises(InvalidParameterError, match=r"--block-size 32"):
        EngineConfig(runner="native", block_size=24)


def test_defaults_are_values_that_pass_their_own_checks():
    config = EngineConfig()

    for option in OPTIONS:
        assert getattr(config, option.name) == option.default
        if option.default is None or option.default == "auto":
            assert option.auto, f"{option.name} is open, but nothing says what that means"


def test_option_table_describes_every_option_once():
    names = [name for option in OPTIONS for name in (option.name, *option.aliases)]

    assert len(names) == len(set(names))
    for option in OPTIONS:
        assert option.help[0].isupper(), option.name
        assert not option.help.endswith("."), option.name
        assert (option.kind == "choice") == bool(option.choices), option.name


@pytest.mark.parametrize(
    ("name", "param", "text"),
    [
        pytest.param("num_blocks", "--num-blocks", "9" * 400, id="count of hundreds of digits"),
        pytest.param("num_blocks", "OCTAVO_NUM_BLOCKS", "9" * 5000, id="count of thousands of digits"),
        pytest.param("num_blocks", "--num-blocks", 10**5000, id="count as a number"),
        pytest.param("memory", "--memory", "9" * 400 + "GiB", id="size of hundreds of digits"),
        pytest.param("memory", "--memory", "9" * 19 + "GiB", id="size beyond 63 bits"),
        pytest.param("memory", "memory", 10**5000, id="size as a number"),
        pytest.param("kv_cache_memory", "--kv-cache-memory-bytes", "²", id="superscript"),
        pytest.param("kv_cache_memory", "--kv-cache-memory-bytes", "9" * 5000, id="bytes of thousands of digits"),
        pytest.param("utilization", "utilization", 10**5000, id="ratio as a number"),
        pytest.param("seed", "--seed", "9" * 5000, id="seed of thousands of digits"),
    ],
)
def test_absurd_number_is_refused_in_few_words(name, param, text):
    with pytest.raises(InvalidParameterError) as caught:
        find_option(name).read(text, param=param)

    assert caught.value.param == param
    assert len(str(caught.value)) < 500


def test_size_is_read_exactly():
    assert find_option("memory").read("8388607.999999TiB", param="--memory") == 8388607999999 * 2**40 // 10**6
    assert find_option("kv_cache_memory").read("1234", param="--kv-cache-memory-bytes") == 1234


@pytest.mark.parametrize(
    ("name", "param", "bad", "fix"),
    [
        ("memory", "--memory", "24", "`--memory 24GiB`"),
        ("memory", "memory", "24", "`--memory 24GiB`"),
        ("memory", "OCTAVO_MEMORY", "24", "`OCTAVO_MEMORY=24GiB`"),
        ("block_size", "OCTAVO_BLOCK_SIZE", "sixteen", "`OCTAVO_BLOCK_SIZE=16`"),
        ("block_size", "--block-size", "0", "`--block-size 16`"),
        ("threads", "--threads", "0", "`--threads 8`"),
    ],
)
def test_hint_at_a_value_is_spelt_as_the_person_spelt_it_and_works(name, param, bad, fix):
    option = find_option(name)
    with pytest.raises(InvalidParameterError) as caught:
        option.read(bad, param=param)

    assert caught.value.hints == (f"write for example {fix}",)
    option.read(re.split("[ =]", fix.strip("`"))[1], param=param)


@pytest.mark.parametrize(("given", "expected"), [("0, 29,1,1", (0, 1, 29)), ([2, "0"], (0, 2)), ("", ()), ((), ())])
def test_layers_are_read_as_a_person_or_a_program_writes_them(given, expected):
    assert EngineConfig(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=given).kv_cache_dtype_skip_layers == expected
