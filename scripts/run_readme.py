"""Runs what README.md shows, and writes down what it really printed.

    .venv/bin/python scripts/run_readme.py      rewrites the outputs in README.md

Console blocks start with a command after `$`; a Python block is followed by a block with its output. A test runs the
same blocks, so that README.md cannot fall behind unnoticed. Outputs are those of AVX2 kernels and 80 columns. `make
run` is left alone: what it shows is a first run, with nothing built and nothing fetched; the test compares its answer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

_CONSOLE = re.compile(
    r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PYTHON = re.compile(r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Something README.md shows: what is run, what it says was printed, and where that stands in the text."""

    kind: str
    source: str
    output: str
    span: tuple[int, int]


def read_blocks(text: str) -> list[Shown]:
    """Return all blocks with an output, in the order of the text."""
    shown = [
        Shown(kind=kind, source=match[group], output=match["output"], span=match.span("output"))
        for kind, group, pattern in (("console", "command", _CONSOLE), ("python", "code", _PYTHON))
        for match in pattern.finditer(text)
    ]
    return sorted(shown, key=lambda one: one.span)


def run_block(shown: Shown, folder: Path, *, model: str | None = None) -> str:
    """Run a block and return what a terminal of 80 columns would show, without trailing blanks.

    Args:
        folder: Where it runs; files it writes end up there.
        model: Used instead of the default model.
    """
    environ = {**os.environ, "COLUMNS": "80"}
    if model is not None:
        environ["OCTAVO_MODEL"] = model
    if shown.kind == "python":
        code = shown.source if model is None else shown.source.replace('"smollm2-135m"', repr(model))
        command = [sys.executable, "-c", code]
    else:
        octavo = f'"{sys.executable}" -m octavo'
        command = ["bash", "-c", shown.source.replace(".venv/bin/octavo", octavo)]
    done = subprocess.run(  # noqa: S603 - the commands of our own README
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{shown.source}\nended with {done.returncode}:\n{done.stdout}"
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def main() -> None:
    """Rewrite the outputs in README.md, the last first so that positions stay right."""
    text = README.read_text(encoding="utf-8")
    for shown in reversed([block for block in read_blocks(text) if not block.source.startswith("make")]):
        begin, end = shown.span
        text = text[:begin] + run_block(shown, ROOT) + text[end:]
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
