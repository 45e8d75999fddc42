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


def find(path: str) -> tuple[LazyCommand, click.Command]:
    """Return a command by its words, `bench offline`."""
    table, found = cli_main.COMMANDS, None
    for word in path.split():
        found = table[word], table[word].load()
        table = getattr(found[1], "lazy", {})
    assert found is not None
    return found


def every_path(table: dict[str, LazyCommand], prefix: str = "") -> list[str]:
    paths = []
    for name, each in table.items():
        if each.is_there:
            paths += [prefix + name, *every_path(getattr(each.load(), "lazy", {}), f"{prefix}{name} ")]
    return paths


PATHS = every_path(cli_main.COMMANDS)
LEAVES = [path for path in PATHS if isinstance(find(path)[1], OctavoCommand)]


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


@pytest.mark.parametrize("path", PATHS)
def test_help_of_a_command_has_examples_and_its_summary(octavo, path):
    ran = octavo(*path.split(), "-h")

    assert ran.code == 0
    assert "Examples:" in ran.out
    listed, command = find(path)
    assert listed.summary == (command.help or "").splitlines()[0].rstrip(".")


@pytest.mark.parametrize("path", PATHS)
def test_examples_of_a_command_parse(path, tmp_path, monkeypatch):
    """Files that an example names are made first; variables in front of `octavo` are the shell's."""
    monkeypatch.chdir(tmp_path)
    assert find(path)[1].examples

    for example in find(path)[1].examples:
        args = split_example(example[example.index("octavo") :])
        words = path.split()
        assert args[: len(words)] == words
        for name in args:
            if name.endswith((".json", ".txt")):
                (tmp_path / name).write_text("[]")
        leaf = max((each for each in LEAVES if args[: len(each.split())] == each.split()), key=len)
        find(leaf)[1].make_context(leaf, args[len(leaf.split()) :])


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_can_answer_in_json(path):
    assert any("--json" in parameter.opts for parameter in find(path)[1].params)


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
