"""Fuzzes the server of a tiny model with its own OpenAPI document: `python scripts/fuzz_api.py [REQUESTS] [SEED]`.

Fails if any answer is wrong, see `octavo.testing.api_fuzz`. A small run is a test; this is the large one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from octavo.testing.api_fuzz import LIMITS, fuzz
from octavo.testing.server_process import ServerProcess
from octavo.testing.tiny_models import TinyModel, write_hf_model


def main() -> int:
    """Run and report."""
    words = sys.argv[1:]
    num_requests = int(words[0]) if words else 2500
    seed = int(words[1]) if len(words) > 1 else 0
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_hf_model(TinyModel(), Path(folder) / "tiny"))
        with ServerProcess(model, "--enable-operator", *LIMITS) as server:
            start_s = time.monotonic()
            fuzzed = fuzz(server.url, num_requests=num_requests, first_seed=seed)
            print(f"{fuzzed.num_requests:,} requests in {time.monotonic() - start_s:.0f} s, seed {seed}")
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
