"""Options from a TOML file: who wins, how it is spelled, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.config_file import read_config_file
from octavo.config.engine import OPTIONS
from octavo.config.sources import Source, ask, environment_source, keyword_source
from octavo.errors import InvalidParameterError, MachineError

VALUES = {"flag": "true", "ratio": "0.5", "bytes": "'1GiB'", "numbers": "[1, 2]"}


def read(tmp_path: Path, text: str) -> Source:
    path = tmp_path / "octavo.toml"
    path.write_text(text, encoding="utf-8")
    return read_config_file(path, OPTIONS)


def test_values_are_read_as_those_of_flags(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        """
        model = "some-model"
        max-model-len = 4096
        kv_cache_memory = "2GiB"
        gpu-memory-utilization = 0.5
        memory = "8 GiB"
        kv-prefault = true
        seed = -3
        """,
    )

    config = ask(file).config

    assert (config.model, config.max_model_len, config.kv_cache_memory) == ("some-model", 4096, 2 * 2**30)
    assert (config.utilization, config.kv_prefault, config.seed) == (0.5, True, -3)


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = read(tmp_path, "seed = 1\nblock_size = 32\nthreads = 2\n")

    asked = ask(keyword_source({"seed": 7}), environment_source({"OCTAVO_BLOCK_SIZE": "64"}), file)

    assert (asked.config.seed, asked.config.block_size, asked.config.threads) == (7, 64, 2)
    assert asked.origins["threads"] == "octavo.toml: threads"
    assert asked.origins["runner"] == "default"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_engine_option_can_stand_in_a_file(tmp_path: Path, option: object) -> None:
    name, kind, choices = option.name, option.kind, option.choices  # type: ignore[attr-defined]
    value = f"'{choices[-1]}'" if choices else VALUES.get(kind, "16" if kind != "text" else "'x'")
    source = read(tmp_path, f"{name.replace('_', '-')} = {value}\n")

    assert option.read(source.values[name], param=name) is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-ln = 3\n", ["octavo.toml: max-model-ln", "did you mean 'max-model-len'?"]),
        ("[engine]\nseed = 3\n", ["octavo.toml: engine", "no table", "leave out the line [engine]"]),
        ("colour = 3\n", ["octavo.toml: colour", "no such option"]),
        ("seed = 3\nseed = 4\n", ["this is no TOML"]),
        ("max-model-len = 3\nmax_seq_len = 4\n", ["octavo.toml: max_seq_len", "given twice"]),
        ("max-model-len = 3\nmax_model_len = 4\n", ["given twice"]),
        ("seed = \n", ["this is no TOML"]),
    ],
)
def test_what_nobody_understands_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read(tmp_path, text)

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "line", ["block-size = 'many'", "seed = [3]", "seed = 2026-01-01", "kv-cache-memory = 4", "memory = 8.5"]
)
def test_a_bad_value_is_named_by_file_and_name(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidParameterError, match=rf"^octavo\.toml: {line.partition(' ')[0]}"):
        ask(read(tmp_path, f"{line}\n"))


def test_a_file_that_is_no_config_is_told_apart_from_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be read"):
        read_config_file(tmp_path / "absent.toml", OPTIONS)
    with pytest.raises(InvalidParameterError, match="is a folder"):
        read_config_file(tmp_path, OPTIONS)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidParameterError, match="is not text"):
        read_config_file(tmp_path / "binary.toml", OPTIONS)
    (tmp_path / "large.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InvalidParameterError, match=r"1\.0 MiB"):
        read_config_file(tmp_path / "large.toml", OPTIONS)
