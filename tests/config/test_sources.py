"""Who wins when several places name the same option."""

from __future__ import annotations

import pytest

from octavo.config.engine import OPTIONS, find_option
from octavo.config.sources import Source, ask, environment_source, explain, foreign_variables, keyword_source
from octavo.errors import InvalidParameterError


def test_stronger_source_wins_and_every_value_names_its_origin():
    flags = Source(name="flag", values={"seed": "1"}, spellings={"seed": "--seed"})
    environment = environment_source({"OCTAVO_SEED": "2", "OCTAVO_THREADS": "3"})
    file = Source(name="octavo.toml", values={"seed": 4, "threads": 5, "block_size": 32}, spellings={})

    asked = ask(flags, environment, file)

    assert (asked.config.seed, asked.config.threads, asked.config.block_size) == (1, 3, 32)
    assert asked.origins["seed"] == "--seed"
    assert asked.origins["threads"] == "OCTAVO_THREADS"
    assert asked.origins["block_size"] == "octavo.toml"
    assert asked.origins["model"] == "default"
    assert set(asked.origins) == {option.name for option in OPTIONS}


def test_keyword_none_leaves_the_word_to_a_weaker_source():
    asked = ask(keyword_source({"max_num_seqs": None}), environment_source({"OCTAVO_MAX_NUM_SEQS": "7"}))

    assert asked.config.max_num_seqs == 7


def test_keywords_of_other_engines_are_understood():
    asked = ask(
        keyword_source(
            {
                "gpu_memory_utilization": 0.5,
                "kv_cache_memory_bytes": 2**20,
                "num_gpu_blocks_override": None,
                "dtype": "bfloat16",
            }
        )
    )

    assert asked.config.utilization == 0.5
    assert asked.config.kv_cache_memory == 2**20
    assert asked.config.weight_dtype == "bf16"
    assert asked.origins["utilization"] == "gpu_memory_utilization"


def test_unknown_keyword_is_refused_with_the_closest_one():
    with pytest.raises(InvalidParameterError, match="did you mean 'max_model_len'") as caught:
        keyword_source({"max_model_length": 5})

    assert caught.value.param == "max_model_length"


def test_option_given_under_two_names_is_refused():
    with pytest.raises(InvalidParameterError, match="given twice"):
        keyword_source({"utilization": 0.5, "gpu_memory_utilization": 0.5})


def test_bad_environment_value_names_the_variable():
    with pytest.raises(InvalidParameterError) as caught:
        ask(environment_source({"OCTAVO_BLOCK_SIZE": "sixteen"}))

    assert caught.value.param == "OCTAVO_BLOCK_SIZE"


def test_misspelt_variable_is_refused_but_an_orchestrators_own_is_not():
    with pytest.raises(InvalidParameterError, match="did you mean OCTAVO_MAX_MODEL_LEN"):
        environment_source({"OCTAVO_MAX_MODEL_LENGTH": "5"})

    service = {"OCTAVO_PORT": "tcp://10.0.0.1:80", "OCTAVO_SERVICE_HOST": "10.0.0.1", "OCTAVO_CACHE": "/c"}
    assert not environment_source(service).values
    assert foreign_variables(service) == ["OCTAVO_PORT", "OCTAVO_SERVICE_HOST"]


def test_empty_variable_counts_as_unset():
    assert ask(environment_source({"OCTAVO_SEED": ""})).config.seed is None


def test_explanation_shows_value_and_origin():
    asked = ask(environment_source({"OCTAVO_KV_CACHE_MEMORY": "4GiB"}))

    assert explain(find_option("kv_cache_memory"), asked) == "4.0 GiB (OCTAVO_KV_CACHE_MEMORY)"
    assert explain(find_option("max_model_len"), asked) == "auto (default)"


@pytest.mark.parametrize(
    ("flag", "variable"), [("num_blocks", "OCTAVO_KV_CACHE_MEMORY"), ("kv_cache_memory", "OCTAVO_NUM_BLOCKS")]
)
def test_pool_size_of_a_stronger_source_overrules_the_other_one_of_a_weaker_source(flag, variable):
    spoken = {"num_blocks": "7", "kv_cache_memory": "1GiB", "OCTAVO_NUM_BLOCKS": "9", "OCTAVO_KV_CACHE_MEMORY": "2GiB"}
    flags = Source(name="flag", values={flag: spoken[flag]}, spellings={flag: f"--{flag}"})

    asked = ask(flags, environment_source({variable: spoken[variable]}))

    expected = {"num_blocks": (7, None), "kv_cache_memory": (None, 2**30)}[flag]
    assert (asked.config.num_blocks, asked.config.kv_cache_memory) == expected
    assert asked.origins[variable.removeprefix("OCTAVO_").lower()] == "default"


def test_pool_sized_twice_by_one_source_is_refused_with_both_spellings():
    with pytest.raises(InvalidParameterError, match="OCTAVO_NUM_BLOCKS: given together with OCTAVO_KV_CACHE_MEMORY"):
        ask(environment_source({"OCTAVO_NUM_BLOCKS": "7", "OCTAVO_KV_CACHE_MEMORY": "1GiB"}))
    with pytest.raises(InvalidParameterError, match="num_gpu_blocks_override: given together with kv_cache_memory"):
        ask(keyword_source({"num_gpu_blocks_override": 7, "kv_cache_memory": 2**30}))
