"""Asks a server whatever its own OpenAPI document allows, and what it does not, and looks for answers that are wrong.

    python scripts/fuzz_api.py [REQUESTS] [SEED]

Wrong is: any status from 500 on, a status or content type that the document does not name, or a body that its schema
does not allow. The server is a tiny model's. A small run is a test; this is the large one.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.testing.server_process import ServerProcess
from octavo.testing.tiny_models import TinyModel, write_hf_model

_NEEDED = {"prompt", "messages", "tokens"}
LIMITS = ("--threads", "1", "--num-blocks", "512", "--max-model-len", "64", "--max-body-bytes", "1MiB")
"""Options of a server whose longest answer is short: requests may ask for anything."""
_CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@dataclass(slots=True)
class Fuzzed:
    """What came of it."""

    num_requests: int = 0
    by_status: Counter[int] = field(default_factory=Counter)
    by_route: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def fuzz(url: str, *, num_requests: int, first_seed: int = 0) -> Fuzzed:
    """Send about `num_requests` requests, as many to each route that takes something, half of them well-formed."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    num_open = sum(_takes_something(operation) for operation in operations)
    fuzzed = Fuzzed()
    with httpx.Client(base_url=url, timeout=60) as client:
        for operation in operations:
            for mode in GenerationMode:
                count = math.ceil(num_requests / num_open / 2) if _takes_something(operation) else 1

                @seed(first_seed)
                @settings(
                    max_examples=count,
                    database=None,
                    deadline=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case: schemathesis.Case) -> None:
                    _ask(case, fuzzed)

                _run(ask)
            assert client.get("/health").status_code == 200, "the server is well after each route"
    return fuzzed


def _takes_something(operation: schemathesis.APIOperation) -> bool:
    return bool(list(operation.body) or list(operation.path_parameters))


def _plainer(body: dict[str, Any], random: Random) -> dict[str, Any]:
    """Return a body with few fields besides the needed ones: of many random ones, some always contradict each other."""
    others = sorted(name for name in body if name not in _NEEDED and name != "model")
    kept = {name: body[name] for name in random.sample(others, min(3, len(others)))}
    for name in _NEEDED & body.keys():
        kept[name] = _as_ids(body[name])
    return kept


def _as_ids(value: Any) -> Any:
    """Return random whole numbers as ids of a tiny vocabulary, everything else as it is."""
    if isinstance(value, list):
        return [_as_ids(each) for each in value]
    return abs(value) % 512 if type(value) is int else value


def _run(ask: object) -> None:
    try:
        ask()  # type: ignore[operator]
    except Exception as error:
        if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):
            raise


def _ask(case: schemathesis.Case, fuzzed: Fuzzed) -> None:
    if isinstance(case.body, dict) and fuzzed.num_requests % 2:
        case.body = _plainer(case.body, Random(fuzzed.num_requests))
    response = case.call()
    fuzzed.num_requests += 1
    fuzzed.by_status[response.status_code] += 1
    fuzzed.by_route[f"{case.method} {case.path}"] += 1
    try:
        case.validate_response(response, checks=_CHECKS)
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - collected, so that one does not hide the others
        fuzzed.failures.append(f"{case.method} {case.path}: {error}"[:1000])


def main() -> int:
    """Run and report."""
    words = sys.argv[1:]
    num_requests = int(words[0]) if words else 2500
    first_seed = int(words[1]) if len(words) > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_hf_model(TinyModel(), Path(folder) / "tiny"))
        with ServerProcess(model, "--enable-operator", *LIMITS) as server:
            start_s = time.monotonic()
            fuzzed = fuzz(server.url, num_requests=num_requests, first_seed=first_seed)
            print(f"{fuzzed.num_requests:,} requests in {time.monotonic() - start_s:.0f} s, seed {first_seed}")
    for status, count in sorted(fuzzed.by_status.items()):
        print(f"  {status}: {count:,}")
    for route, count in sorted(fuzzed.by_route.items()):
        print(f"  {route}: {count:,}")
    for failure in fuzzed.failures[:20]:
        print(f"WRONG {failure}")
    print(f"{len(fuzzed.failures):,} wrong answers")
    return 1 if fuzzed.failures else 0


if __name__ == "__main__":
    sys.exit(main())
