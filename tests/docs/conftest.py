"""What the tests of the documents share: the documents, the scripts that write them, and a model to run them with."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from octavo.errors import OctavoError
from octavo.testing.real_model import find_real_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def documents() -> dict[str, str]:
    """Text of every document by its path below the root."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(paths)}


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Import a file of `scripts/` by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def real_model() -> Path:
    try:
        return find_real_model()
    except OctavoError as error:
        pytest.skip(f"the default model cannot be had here: {error.message}")
