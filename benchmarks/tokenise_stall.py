"""How long a running stream stands still while the server reads prompts of a megabyte: the longest gap between tokens.

    PYTHONPATH=src python benchmarks/tokenise_stall.py [--model smollm2-135m] [--tokens 400] [--json]

One greedy stream, first alone, then while another client keeps sending a megabyte of text, one request after the other:
for `/tokenize`, which answers with all its token ids, and for `/v1/completions`, which reads it and says that it is too
long. A gap is between two pieces of text as the client gets them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from octavo.llm.http_stream import open_stream, parse_url
from octavo.testing.known_load import KnownRequest
from octavo.testing.load_client import hear
from octavo.testing.server_process import ServerProcess

TEXT = Path(__file__).with_name("data") / "austen.txt"
NUM_CHARS = 1_000_000
LARGE: Mapping[str, str] = {"tokenize": "/tokenize", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps of one stream, in milliseconds."""

    beside: str
    num_large_prompts: int
    median_ms: float
    max_ms: float


async def measure(url: str, num_tokens: int, beside: str | None) -> Gaps:
    """Read one stream, with large prompts beside it or alone."""
    num_large = 0
    request = KnownRequest(prompt_token_ids=tuple(range(200, 232)), max_tokens=num_tokens)
    async with _large_prompts(url, beside) as counts:
        heard = await hear(parse_url(url), request.ask(with_scores=False), start_s=time.perf_counter())
        num_large = len(counts)
    assert heard.fate == "answered", heard.why
    gaps = [after - before for before, after in pairwise(heard.chunk_s)]
    return Gaps(
        beside=beside or "nothing",
        num_large_prompts=num_large,
        median_ms=median(gaps) * 1000,
        max_ms=max(gaps) * 1000,
    )


@contextlib.asynccontextmanager
async def _large_prompts(url: str, beside: str | None) -> AsyncIterator[list[int]]:
    statuses: list[int] = []
    if beside is None:
        yield statuses
        return
    text = TEXT.read_text(encoding="utf-8")
    text = (text * (NUM_CHARS // len(text) + 1))[:NUM_CHARS]
    body = json.dumps({"prompt": text}).encode()  # written once: this client must not stand still either

    async def send() -> None:
        while True:
            headers = {"Content-Type": "application/json"}
            async with open_stream("POST", parse_url(url), LARGE[beside], headers=headers, body=body) as answer:
                await answer.read()
                assert answer.status == (200 if beside == "tokenize" else 400), answer.status
            statuses.append(answer.status)

    sending = asyncio.create_task(send())
    try:
        yield statuses
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=400, metavar="N")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with ServerProcess(asked.model, "--kv-cache-memory", "256MiB", "--max-model-len", "2k", "--quiet") as server:
        asyncio.run(measure(server.url, 50, None))  # warms everything up
        rows = [asyncio.run(measure(server.url, asked.tokens, beside)) for beside in (None, *LARGE)]
    if asked.json:
        print(json.dumps({"schema": "octavo.bench.tokenise-stall/1", "gaps": [asdict(row) for row in rows]}))
        return 0
    print(f"{'beside the stream':<20}{'large prompts':>14}{'median gap ms':>15}{'longest gap ms':>16}")
    for row in rows:
        print(f"{row.beside:<20}{row.num_large_prompts:>14}{row.median_ms:>15.1f}{row.max_ms:>16.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
