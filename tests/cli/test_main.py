"""Exit codes, errors and where words go, the same for every command."""

from __future__ import annotations

import json

import click
import pytest

from octavo.cli import main as cli_main
from octavo.cli.command import LazyCommand, OctavoCommand, split_example
from octavo.cli.options import REFUSED_FLAGS
from octavo.errors import CapacityError
from octavo.version import __version__

COMMANDS = sorted(name for name, each in cli_main.COMMANDS.items() if each.is_there)


def test_help_lists_what_is_there(octavo):
    for flag in ("-h", "--help"):
        ran = octavo(flag)

        assert ran.code == 0
        assert all(f"  {name} " in ran.out for name in COMMANDS)
        assert "octavo pull" in ran.out


def test_command_that_is_not_built_is_not_offered(octavo, monkeypatch):
    monkeypatch.setitem(cli_main.COMMANDS, "later", LazyCommand("octavo.cli.later", "Comes later"))

    assert "later" not in octavo("-h").out
    assert octavo("later").code == 2


def test_version_names_package_native_build_and_kernels(octavo):
    ran = octavo("--version")

    assert ran.code == 0
    assert ran.out.startswith(f"octavo {__version__}\n")
    assert "native module: " in ran.out
    assert "kernels: " in ran.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_and_its_summary(octavo, name):
    ran = octavo(name, "-h")

    assert ran.code == 0
    assert "Examples:" in ran.out
    command = cli_main.COMMANDS[name].load()
    first_line = (command.help or "").splitlines()[0].rstrip(".")
    assert cli_main.COMMANDS[name].summary == first_line


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_a_command_parse(name):
    command = cli_main.COMMANDS[name].load()
    assert isinstance(command, OctavoCommand)
    assert command.examples

    for example in command.examples:
        words = [word for word in example.split(" ", 1) if not word.isupper()]
        plain = example if words[0] == "octavo" else example[example.index("octavo") :]
        args = split_example(plain)
        assert args[0] == name
        command.make_context(name, args[1:], resilient_parsing=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_answer_in_json(name):
    command = cli_main.COMMANDS[name].load()

    assert any("--json" in parameter.opts for parameter in command.params)


def test_misspelt_command_gets_the_closest_one(octavo):
    ran = octavo("docter")

    assert ran.code == 2
    assert ran.out == ""
    assert "error[usage]: there is no command 'docter'" in ran.err
    assert "hint: did you mean `octavo doctor`?" in ran.err


def test_misspelt_option_gets_the_closest_one(octavo):
    ran = octavo("doctor", "--max-model-length", "5")

    assert ran.code == 2
    assert "there is no option --max-model-length" in ran.err
    assert "hint: did you mean" in ran.err
    assert "--max-model-len" in ran.err


@pytest.mark.parametrize("flag", sorted(REFUSED_FLAGS))
def test_flag_of_another_engine_is_refused_with_what_to_know(octavo, flag):
    ran = octavo("doctor", flag, "2")

    assert ran.code == 2
    assert f"{flag} is not supported" in ran.err
    assert f"hint: {REFUSED_FLAGS[flag]}" in ran.err


def test_option_without_its_value_is_a_usage_error(octavo):
    ran = octavo("doctor", "--threads")

    assert ran.code == 2
    assert ran.err.startswith("error[usage]: ")


def test_bad_value_names_the_option_as_it_was_spelt(octavo):
    ran = octavo("doctor", "--gpu-memory-utilization", "90")

    assert ran.code == 2
    assert ran.err.startswith("error[invalid-parameter]: --gpu-memory-utilization: '90' is not a ratio")


def test_error_is_a_document_when_json_is_asked_for(octavo):
    ran = octavo("pull", "smollm2", "--json")

    document = json.loads(ran.out)
    assert ran.code == 1
    assert document["schema"] == "octavo.error/1"
    assert document["error"]["code"] == "model-not-found"
    assert document["error"]["hints"] == ["did you mean `smollm2-135m`?"]
    assert "error[model-not-found]" in ran.err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        pytest.param(
            CapacityError("too big", hints=("less",)), 3, "error[does-not-fit]: too big\nhint: less", id="fit"
        ),
        pytest.param(KeyboardInterrupt(), 130, "interrupted", id="ctrl-c"),
        pytest.param(click.Abort(), 130, "interrupted", id="abort"),
        pytest.param(ZeroDivisionError("oops"), 1, "error[internal]: ZeroDivisionError: oops", id="bug"),
    ],
)
def test_what_is_raised_becomes_a_message_and_an_exit_code(octavo, monkeypatch, raised, code, said):
    @click.command("fails", cls=OctavoCommand)
    def fails():
        raise raised

    monkeypatch.setattr(LazyCommand, "load", lambda _self: fails)

    ran = octavo("doctor")

    assert ran.code == code
    assert ran.out == ""
    assert ran.err.strip().startswith(said)
    assert ("Traceback" in ran.err) == (code == 1)


def test_reader_that_leaves_early_is_no_error_worth_words(octavo_process, tmp_path):
    import subprocess
    import sys

    done = subprocess.run(
        f"{sys.executable} -m octavo doctor --json | head -c 1", shell=True, capture_output=True, text=True, check=False
    )

    assert done.stdout == "{"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
