"""README.md is true: what it shows is what happens, what it says to type can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click
import pytest

from octavo.cli.main import COMMANDS, octavo

_CONSOLE = re.compile(r"^(?:\$ |    )(?:\.venv/bin/)?(octavo (?:.*\\\n)*.*)$", re.MULTILINE)
_MAKE = re.compile(r"`make ?([a-z]*)|^(?:\$ |    )make ([a-z]+)", re.MULTILINE)


def commands_in(text: str) -> list[str]:
    """Return the `octavo` command lines that a document shows."""
    shown = [*_CONSOLE.findall(text), *re.findall(r"`(octavo [^`]+)`", text)]
    return [command.replace("\\\n", " ") for command in shown]


def parse(command: str) -> None:
    """Let click parse a command line without running it."""
    words = shlex.split(command.partition(" > ")[0].partition(" | ")[0])[1:]
    named = octavo.get_command(click.Context(octavo), words[0])
    assert named is not None, words[0]
    named.make_context(words[0], words[1:], parent=click.Context(octavo, info_name="octavo"))


def test_command_lines_in_the_documents_can_be_parsed(documents: dict[str, str]) -> None:
    num_parsed = 0
    for name, text in documents.items():
        for command in commands_in(text):
            if name == "docs/cli.md" or "..." in command or re.search(r"\b[A-Z]{4,}\b", command.split("'")[0]):
                continue  # generated from the commands themselves; or a pattern, not a command
            words = command.split()
            if len(words) == 1 or words[1].startswith("-") or not COMMANDS[words[1].rstrip("`,.")].is_there:
                continue
            try:
                parse(command)
            except click.ClickException as error:
                pytest.fail(f"{name} shows `{command}`: {error.format_message()}")
            num_parsed += 1
    assert num_parsed >= 6


def test_targets_of_make_in_the_documents_are_there(root: Path, documents: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {target for text in documents.values() for pair in _MAKE.findall(text) for target in pair if target}
    assert {"run", "test"} <= named <= targets


def test_commands_said_to_be_missing_are_the_missing_ones(documents: dict[str, str]) -> None:
    line = next(line for line in documents["README.md"].splitlines() if "Commands that are planned" in line)
    missing = {name for name, command in COMMANDS.items() if not command.is_there}
    assert set(re.findall(r"`(\w+)`", line)) == missing, "README.md, *Not here*"


def test_readme_is_short_and_its_first_lines_say_how_to_start(documents: dict[str, str]) -> None:
    lines = documents["README.md"].splitlines()
    assert len(lines) <= 300
    start = "\n".join(lines[:60])
    assert "make run" in start and "make test" in start and "from octavo import LLM, SamplingParams" in start


@pytest.fixture(scope="module")
def runner(script: Callable[[str], ModuleType]) -> ModuleType:
    native = pytest.importorskip("octavo.runtime._native", reason="README.md shows what the native kernels answer")
    if native.isa_name("auto") != "avx2":
        pytest.skip(f"README.md shows what AVX2 kernels answer; this machine has {native.isa_name('auto')}")
    return script("run_readme")


def test_what_readme_shows_is_what_happens(
    runner: ModuleType, documents: dict[str, str], real_model: Path, tmp_path: Path
) -> None:
    """Answers, too: the same tokens give the same bits on the same instruction set."""
    blocks = [block for block in runner.read_blocks(documents["README.md"]) if not block.source.startswith("make")]
    assert [block.kind for block in blocks].count("python") == 1 and len(blocks) >= 3
    for block in blocks:
        now = runner.run_block(block, tmp_path, model=str(real_model))
        assert block.output == now, f"README.md is behind: run `python scripts/run_readme.py`\n{block.source}"


def test_make_run_answers_what_readme_says(
    runner: ModuleType, root: Path, documents: dict[str, str], real_model: Path, tmp_path: Path
) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    prompt = re.search(r"^PROMPT \?= (.+)$", makefile, re.MULTILINE)
    recipe = re.search(r"octavo (generate .+)$", makefile, re.MULTILINE)
    assert prompt is not None and recipe is not None
    source = ".venv/bin/octavo " + recipe[1].replace("$$PROMPT", prompt[1]) + " -q"
    shown = next(block for block in runner.read_blocks(documents["README.md"]) if block.source == "make run")

    answer = runner.run_block(
        runner.Shown(kind="console", source=source, output="", span=(0, 0)), tmp_path, model=str(real_model)
    )

    assert answer.strip() and answer in shown.output, "README.md is behind: run `python scripts/run_readme.py`"
