"""Running command lines in this process, and commands as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from octavo.cli.main import run


@dataclass
class Ran:
    """What a command line left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def octavo(capsys, monkeypatch) -> Callable[..., Ran]:
    """Run `octavo ARGS` in this process, without engine options from the environment."""
    for name in list(os.environ):
        if name.startswith("OCTAVO_") and name != "OCTAVO_CACHE":
            monkeypatch.delenv(name)

    monkeypatch.delenv("COLUMNS", raising=False)  # a parallel test run sets it to its own terminal's width

    def call(*args: str) -> Ran:
        capsys.readouterr()
        code = run(list(args))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def octavo_process() -> Callable[..., Ran]:
    """Run `octavo ARGS` as a process, with `environ` as its whole environment besides PATH and PYTHONPATH."""

    def call(*args: str, **environ: str) -> Ran:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        done = subprocess.run(
            [sys.executable, "-m", "octavo", *args],
            env={**kept, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return call
