"""Options of `octavo serve`: where values come from, what is refused, and what the command says before it binds."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from octavo.cli.server_options import server_options
from octavo.config.sources import AskedConfig
from octavo.errors import InvalidParameterError, MachineError
from octavo.server.settings import SERVER_OPTIONS, ServerSettings


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch):
    """Read a command line and an environment as `octavo serve` does."""

    def call(*args: str, **environ: str) -> tuple[AskedConfig, ServerSettings]:
        for name in list(os.environ):
            if name.startswith("OCTAVO_"):
                monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        found = []

        @click.command()
        @server_options
        def command(asked: AskedConfig, settings: ServerSettings) -> None:
            found.append((asked, settings))

        command.main(list(args), standalone_mode=False)
        return found[0]

    return call


def test_a_flag_wins_over_a_variable_a_variable_over_the_file_and_the_file_over_the_default(read, tmp_path: Path):
    file = tmp_path / "octavo.toml"
    file.write_text(
        'port = 1\nhost = "0.0.0.0"\nmax-model-len = 100\nseed = 7\nlog_format = "json"\napi-key = ["a", "b"]\n'
    )
    config = ("--config", str(file))

    asked, settings = read(*config, "--port", "3", "--seed", "9", OCTAVO_PORT="2", OCTAVO_HOST="::1", OCTAVO_SEED="8")

    assert (settings.port, settings.host, settings.log_format) == (3, "::1", "json")
    assert (asked.config.seed, asked.config.max_model_len) == (9, 100)
    assert settings.api_key == ("a", "b")
    assert settings.drain_timeout == 25.0
    assert asked.origins["max_model_len"] == "octavo.toml: max-model-len"


def test_repeatable_options_are_lists_in_every_place(read, tmp_path: Path):
    file = tmp_path / "octavo.toml"
    file.write_text('served-model-name = "x"\n')

    assert read("--served-model-name", "a", "--served-model-name", "b")[1].served_model_name == ("a", "b")
    assert read(OCTAVO_API_KEY="one, two")[1].api_key == ("one", "two")
    assert read(OCTAVO_CONFIG=str(file))[1].served_model_name == ("x",)


def test_what_orchestrators_put_into_the_environment_is_no_option(read):
    """A service called octavo gets OCTAVO_PORT=tcp://... and more; they say nothing about this server."""
    service = {"OCTAVO_PORT": "tcp://10.0.0.1:8000", "OCTAVO_PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    others = {"OCTAVO_SERVICE_HOST": "10.0.0.1", "OCTAVO_SERVICE_PORT": "8000", "OCTAVO_PORT_8000_TCP_PROTO": "tcp"}

    assert read(**service, **others)[1].port == 8000


def test_a_misspelt_variable_is_refused_with_the_right_one(read):
    with pytest.raises(InvalidParameterError, match="OCTAVO_API_KEY"):
        read(OCTAVO_API_KEYS="secret")


@pytest.mark.parametrize(
    ("args", "param"),
    [
        (("--port", "70000"), "--port"),
        (("--port", "x"), "--port"),
        (("--log-format", "xml"), "--log-format"),
        (("--drain-timeout", "-1"), "--drain-timeout"),
        (("--drain-timeout", "nan"), "--drain-timeout"),
        (("--max-body-bytes", "x"), "--max-body-bytes"),
        (("--api-key", ""), "--api-key"),
    ],
)
def test_a_bad_value_is_named_as_it_was_spelt(read, args: tuple[str, ...], param: str):
    with pytest.raises(InvalidParameterError) as caught:
        read(*args)
    assert caught.value.param in (param, param.lstrip("-"))


def test_a_file_is_read_strictly(read, tmp_path: Path):
    file = tmp_path / "octavo.toml"
    for text, words in (
        ("prot = 1", "did you mean 'port'"),
        ("port = ", "no TOML"),
        ('config = "x"', "no such option"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidParameterError, match=words):
            read("--config", str(file))
    with pytest.raises(MachineError, match="cannot be read"):
        read("--config", str(tmp_path / "missing"))


def test_every_setting_has_a_flag_a_variable_and_help():
    for option in SERVER_OPTIONS:
        assert option.help and option.group in ("Server", "Security")
        assert option.env == f"OCTAVO_{option.name.upper()}"


def test_a_key_is_not_in_what_the_settings_look_like():
    assert "sekret" not in repr(ServerSettings(api_key=("sekret",), operator_key="sekret2"))
