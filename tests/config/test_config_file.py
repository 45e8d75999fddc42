"""Options from a TOML file: who wins, how it is spelled, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.config_file import ConfigFile, read_config_file
from octavo.config.engine import OPTIONS
from octavo.config.sources import ask, environment_source, keyword_source
from octavo.errors import InvalidParameterError, MachineError

TABLES = ("engine", "serve")


def read(tmp_path: Path, text: str) -> ConfigFile:
    path = tmp_path / "octavo.toml"
    path.write_text(text, encoding="utf-8")
    return read_config_file(path, tables=TABLES)


def test_values_are_read_as_those_of_flags(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        """
        [engine]
        model = "some-model"
        max-model-len = 4096
        kv_cache_memory = "2GiB"
        gpu-memory-utilization = 0.5
        memory = "8 GiB"
        kv-prefault = true
        seed = -3
        """,
    )

    config = ask(file.engine_source()).config

    assert (config.model, config.max_model_len, config.kv_cache_memory) == ("some-model", 4096, 2 * 2**30)
    assert (config.utilization, config.kv_prefault, config.seed) == (0.5, True, -3)


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = read(tmp_path, "[engine]\nseed = 1\nblock_size = 32\nthreads = 2\n").engine_source()

    asked = ask(keyword_source({"seed": 7}), environment_source({"OCTAVO_BLOCK_SIZE": "64"}), file)

    assert (asked.config.seed, asked.config.block_size, asked.config.threads) == (7, 64, 2)
    assert asked.origins["threads"] == "octavo.toml: engine.threads"
    assert asked.origins["runner"] == "default"


def test_every_engine_option_can_stand_in_a_file(tmp_path: Path) -> None:
    for option in OPTIONS:
        value = option.choices[-1] if option.choices else {"flag": "true", "ratio": "0.5"}.get(option.kind, "'16'")
        line = f"{option.name} = {repr(value) if option.choices else value}"
        text = "'1GiB'" if option.kind == "bytes" else None
        file = read(tmp_path, f"[engine]\n{option.name} = {text}\n" if text else f"[engine]\n{line}\n")

        assert option.name in file.engine_source().values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nmax-model-ln = 3\n", ["octavo.toml: engine.max-model-ln", "did you mean 'max-model-len'?"]),
        ("[engin]\nseed = 3\n", ["octavo.toml: engin", "did you mean 'engine'?"]),
        ("[database]\nseed = 3\n", ["there are [engine], [serve]"]),
        ("seed = 3\n", ["octavo.toml: seed", "outside every table", "put it below [engine]"]),
        ("colour = 3\n", ["outside every table", "[engine], [serve]"]),
        ("engine = 3\n", ["write [engine]"]),
        ("[engine]\nseed = 3\nseed = 4\n", ["this is not TOML"]),
        ("[engine]\nmax-model-len = 3\nmax_seq_len = 4\n", ["given twice"]),
        ("[engine\n", ["this is not TOML"]),
    ],
)
def test_what_nobody_understands_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read(tmp_path, text).engine_source()

    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["block-size = 'many'", "seed = [3]", "seed = 2026-01-01", "seed = {a = 1}", "kv-cache-memory = 4", "memory = 8.5"],
)
def test_a_bad_value_is_named_by_file_and_table(tmp_path: Path, line: str) -> None:
    file = read(tmp_path, f"[engine]\n{line}\n")

    with pytest.raises(InvalidParameterError, match=rf"^octavo\.toml: engine\.{line.partition(' ')[0]}"):
        ask(file.engine_source())


def test_another_table_is_checked_against_its_own_names(tmp_path: Path) -> None:
    file = read(tmp_path, "[serve]\nport = 80\nserved-model-name = ['a', 'b']\n")

    assert file.table("serve", ("port", "served_model_name")) == {"port": 80, "served_model_name": ["a", "b"]}
    assert file.spelling("serve", "served_model_name") == "octavo.toml: serve.served-model-name"
    assert file.table("engine", ()) == {}
    with pytest.raises(InvalidParameterError, match="did you mean 'port'"):
        read(tmp_path, "[serve]\nprot = 80\n").table("serve", ("port",))
    with pytest.raises(InvalidParameterError, match="twice"):
        read(tmp_path, "[serve]\na-b = 1\na_b = 2\n").table("serve", ("a_b",))


def test_a_file_that_is_no_config_is_told_apart_from_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be read"):
        read_config_file(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidParameterError, match="not UTF-8"):
        read_config_file(tmp_path / "binary.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InvalidParameterError, match="1 MiB"):
        read_config_file(tmp_path / "large.toml")
