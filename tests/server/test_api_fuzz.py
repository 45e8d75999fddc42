"""The server's own OpenAPI document, asked at random: no answer from 500 on, none that the document does not name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from octavo.testing.server_process import ServerProcess

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_api.py"


def load_script():
    spec = importlib.util.spec_from_file_location("fuzz_api", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_api"] = module  # its dataclass asks for its module
    spec.loader.exec_module(module)
    return module


def test_whatever_the_document_allows_or_not_is_answered_as_it_says(tiny_model: str):
    script = load_script()
    with ServerProcess(tiny_model, "--enable-operator", *script.LIMITS) as server:
        fuzzed = script.fuzz(server.url, num_requests=110)

    assert fuzzed.failures == []
    assert fuzzed.num_requests >= 80
    assert fuzzed.by_status[200] >= 10 and fuzzed.by_status[400] >= 10, "both kinds were asked"
