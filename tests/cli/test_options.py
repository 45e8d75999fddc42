"""The option table on the command line."""

from __future__ import annotations

import click
import pytest

from octavo.cli.command import OctavoCommand
from octavo.cli.options import engine_options, output_options
from octavo.config.engine import OPTIONS, EngineConfig
from octavo.config.sources import AskedConfig
from octavo.errors import InvalidParameterError


def parse(*args: str) -> AskedConfig:
    seen = []

    @click.command("probe", cls=OctavoCommand)
    @engine_options
    @output_options
    def probe(asked, output):
        seen.append(asked)

    probe.main(list(args), standalone_mode=False)
    return seen[0]


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch):
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)


def test_nothing_given_is_the_default_config():
    asked = parse()

    assert asked.config == EngineConfig()
    assert set(asked.origins.values()) == {"default"}


SAMPLES = {
    "text": "some/model",
    "count": "32",
    "integer": "-7",
    "bytes": "3GiB",
    "ratio": "0.5",
    "numbers": "0,3",
}
NEEDS = {
    "attention_sinks": ("--attention-window", "64"),
    "kv_cache_dtype_skip_layers": ("--kv-cache-dtype", "int8"),
}
"""Options without which another contradicts the default."""


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.kind != "flag"], ids=lambda each: each.name)
def test_every_option_and_alias_reaches_the_config(option):
    sample = option.choices[-1] if option.choices else SAMPLES[option.kind]
    if option.kind == "integer":
        sample = str(max(int(sample), option.minimum))
    expected = option.read(sample, param=option.name)

    spellings = [f"--{name.replace('_', '-')}" for name in (option.name, *option.aliases)]
    for spelling in spellings:
        asked = parse(spelling, sample, *NEEDS.get(option.name, ()))
        assert getattr(asked.config, option.name) == expected
        assert asked.origins[option.name] == spelling


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--no-prefix-caching", False),
        ("--prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--enable-prefix-caching", True),
    ],
)
def test_prefix_caching_is_turned_off_in_either_dialect(flag, expected):
    asked = parse(flag)

    assert asked.config.enable_prefix_caching is expected
    assert asked.origins["enable_prefix_caching"] == flag


def test_model_is_the_first_argument_or_a_flag_but_not_both():
    assert parse("./m.gguf").config.model == "./m.gguf"
    assert parse("--model", "./m.gguf").config.model == "./m.gguf"
    with pytest.raises(InvalidParameterError, match="give one"):
        parse("./m.gguf", "--model", "./n.gguf")


def test_two_spellings_of_one_option_are_refused():
    with pytest.raises(InvalidParameterError, match="says the same as --utilization"):
        parse("--utilization", "0.5", "--gpu-memory-utilization", "0.6")


def test_flag_wins_over_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_THREADS", "3")
    monkeypatch.setenv("OCTAVO_SEED", "5")

    asked = parse("--threads", "1")

    assert (asked.config.threads, asked.config.seed) == (1, 5)
    assert (asked.origins["threads"], asked.origins["seed"]) == ("--threads", "OCTAVO_SEED")


def test_bytes_alias_takes_a_bare_number():
    assert parse("--kv-cache-memory-bytes", "1048576").config.kv_cache_memory == 2**20
    with pytest.raises(InvalidParameterError, match="not a size"):
        parse("--kv-cache-memory", "1048576")
