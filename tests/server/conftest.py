"""A real server process with a tiny model, shared by the tests of a worker."""

from __future__ import annotations

import pytest

from octavo.testing.server_process import SMALL, ServerProcess
from octavo.testing.tiny_models import TinyModel, write_hf_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(TinyModel(), tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def server(tiny_model: str):
    with ServerProcess(tiny_model, "--enable-operator", *SMALL) as running:
        yield running
