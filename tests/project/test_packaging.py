"""The project's own files agree with each other."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from octavo.version import __version__

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
REQUIREMENTS = [
    *PYPROJECT["project"]["dependencies"],
    # An extra may build on another one of ours.
    *(each for extra in EXTRAS.values() for each in extra if not each.startswith("octavo[")),
]


def test_installed_version_is_the_one_in_the_source():
    try:
        installed = metadata.version("octavo")
    except metadata.PackageNotFoundError:
        pytest.skip("octavo runs from its source tree, it is not installed")
    assert installed == __version__


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_requirement_is_a_lower_bound_and_documented(requirement):
    name, bound = re.fullmatch(r"([a-z0-9-]+)([=>]=[0-9.]+)", requirement).groups()

    assert bound.startswith(">=") or requirement == "torch==2.13.0"
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", (ROOT / "docs" / "dependencies.md").read_text())


def test_run_time_needs_no_torch():
    assert not any("torch" in each for each in PYPROJECT["project"]["dependencies"])


def test_no_file_of_the_build_names_an_index():
    """Where packages come from is the user's choice, made in pip's settings."""
    for name in ("pyproject.toml", "Makefile", "CMakeLists.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text, name
        assert "://" not in text, name
