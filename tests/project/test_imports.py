"""What importing costs, and what each layer may need: checked in processes of their own."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import octavo

HEAVY = (
    "numpy", "click", "rich", "gguf", "tokenizers", "jinja2", "huggingface_hub", "torch", "transformers", "fastapi",
)  # fmt: skip
PLAIN_LAYERS = ("config", "core", "engine", "planner")


def loaded_by(code: str, *args: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level modules it loaded."""
    probe = f"{code}\nimport sys, json\nprint('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe, *args], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_the_package_imports_nothing_heavy():
    assert not loaded_by("import octavo") & set(HEAVY)


def test_help_needs_click_alone():
    code = "from octavo.cli.main import run\nassert run(['-h']) == 0"

    assert loaded_by(code) & set(HEAVY) == {"click"}


@pytest.mark.parametrize("command", ["pull", "doctor"])
def test_help_of_a_command_does_not_load_what_the_command_needs(command):
    code = f"from octavo.cli.main import run\nassert run([{command!r}, '-h']) == 0"

    assert loaded_by(code) & set(HEAVY) == {"click"}


@pytest.mark.parametrize("layer", PLAIN_LAYERS)
def test_layer_works_without_any_third_party_package(layer):
    """Every module of the layer is imported in an interpreter that knows the standard library and Octavo only."""
    package = f"octavo.{layer}"
    root = next(path for path in octavo.__path__ if os.path.isdir(os.path.join(path, layer)))  # noqa: PTH112, PTH118
    names = [name for _, name, _ in pkgutil.walk_packages([os.path.join(root, layer)], f"{package}.")]  # noqa: PTH118
    assert names
    code = "import importlib, sys\nsys.path.insert(0, sys.argv[1])\nlist(map(importlib.import_module, sys.argv[2:]))"

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, os.path.dirname(root), *names],  # noqa: PTH120
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_public_names_are_few_and_there():
    assert len(octavo.__all__) <= 15
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
