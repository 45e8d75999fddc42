"""Exit codes, errors and where words go, the same for every command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

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


@pytest.mark.parametrize("path", ["", *(path for path in PATHS if path not in LEAVES)])
def test_group_without_a_command_answers_with_its_help(octavo, path):
    ran = octavo(*path.split())

    assert ran.code == 2
    assert ran.out == ""
    assert ran.err == octavo(*path.split(), "-h").out
    assert ran.err.startswith("Usage: octavo")


def test_memory_that_runs_out_does_not_fit(octavo, monkeypatch):
    @click.command("fails", cls=OctavoCommand)
    @click.option("--json", is_flag=True)
    def fails(json):
        raise MemoryError

    monkeypatch.setattr(LazyCommand, "load", lambda _self: fails)

    ran = octavo("doctor", "--json")

    assert ran.code == 3
    assert json.loads(ran.out)["error"]["code"] == "does-not-fit"
    assert ran.err.startswith("error[does-not-fit]: ")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    script = f'octavo() {{ {shlex.quote(sys.executable)} -m octavo "$@"; }}; {command}'
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)


full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


@full_device
@pytest.mark.parametrize("command", ["doctor", "doctor --json", "-h", "--version", "pull nothing --json"])
def test_full_stdout_is_one_clear_line(command):
    done = shell(f"octavo {command} > /dev/full")

    assert done.returncode == 1
    assert done.stderr == "error[machine]: cannot write the output: No space left on device\n"


@full_device
def test_full_stderr_fails_without_words():
    done = shell("octavo pull nothing 2> /dev/full")

    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["doctor", "-h", "generate -p hi"])
def test_closed_stdout_is_one_clear_line(command):
    done = shell(f"octavo {command} >&-")

    assert done.returncode == 1
    assert done.stderr == "error[machine]: cannot write the output: stdout is closed\n"


def test_closed_stdin_and_stderr_change_nothing():
    done = shell("octavo doctor --json <&- 2>&-")

    assert done.returncode == 0
    assert json.loads(done.stdout)


def test_file_that_cannot_be_read_is_not_taken_for_an_output_that_cannot_be_written(octavo, monkeypatch):
    @click.command("fails", cls=OctavoCommand)
    def fails():
        raise OSError(5, "Input/output error", "weights")

    monkeypatch.setattr(LazyCommand, "load", lambda _self: fails)

    assert "error[internal]" in octavo("doctor").err


@pytest.mark.parametrize("module", ["octavo.cli.main", "click"])
def test_interrupt_while_the_command_line_is_still_loading_is_one_line(tmp_path, module):
    """A finder that interrupts the import of a module stands for Ctrl-C at that time."""
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from octavo.__main__ import main\n"
        "main()\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_console_script_loads_the_command_line_inside_its_guard():
    project = Path(__file__).parents[2] / "pyproject.toml"

    assert tomllib.loads(project.read_text())["project"]["scripts"] == {"octavo": "octavo.__main__:main"}
