"""How long a running stream stands still while the server reads large requests: the longest gap between tokens.

    PYTHONPATH=src python benchmarks/tokenise_stall.py [--model smollm2-135m] [--tokens 400] [--only NAME] [--json]

One greedy stream, first alone, then while another client keeps sending one large request after the other: a megabyte of
text for `/tokenize`, which answers with all its token ids, and for `/v1/completions`, which says that it is too long;
four megabytes of JSON in as many small values as they can hold: token ids, messages, parts of a message, tools; and a
request for 260,000 log-probabilities.
A gap is between two pieces of text as the client gets them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
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
MAX_BODY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A request that takes long to read; `status` is how it is answered."""

    path: str
    body: bytes
    status: int


def _text(path: str, status: int) -> Large:
    text = TEXT.read_text(encoding="utf-8")
    text = (text * (NUM_CHARS // len(text) + 1))[:NUM_CHARS]
    return Large(path=path, body=json.dumps({"prompt": text}).encode(), status=status)


def _repeated(path: str, status: int, *, before: str, each: str, after: str, most: int = MAX_BODY_BYTES) -> Large:
    num = min(most, (MAX_BODY_BYTES - len(before) - len(after)) // (len(each) + 1))
    return Large(path=path, body=(before + ",".join([each] * num) + after).encode(), status=status)


_USER = '{"role": "user", "content": "a"}'
_SCORES = {"prompt": [9] * 255, "echo": True, "logprobs": 1023, "max_tokens": 0}
LARGE: Mapping[str, Callable[[], Large]] = {
    "log-probabilities": lambda: Large(path="/v1/completions", body=json.dumps(_SCORES).encode(), status=200),
    "tokenize": lambda: _text("/tokenize", 200),
    "completions": lambda: _text("/v1/completions", 400),
    "ids to detokenize": lambda: _repeated(
        "/detokenize", 200, before='{"tokens": [', each="99", after="]}", most=2**20
    ),
    "prompt of ids": lambda: _repeated("/v1/completions", 400, before='{"prompt": [', each="9", after="]}"),
    "special ids": lambda: _repeated("/v1/completions", 400, before='{"n": 8, "prompt": [', each="0", after="]}"),
    "messages": lambda: _repeated(
        "/v1/chat/completions", 400, before='{"messages": [', each=_USER, after="]}", most=10_000
    ),
    "parts": lambda: _repeated(
        "/v1/chat/completions",
        400,
        before='{"messages": [{"role": "user", "content": [',
        each='{"type": "text", "text": "a a a a"}',
        most=90_000,
        after="]}]}",
    ),
    "tools": lambda: _repeated(
        "/v1/chat/completions",
        400,
        before=f'{{"messages": [{_USER}], "tools": [{{"type": "function", "function": {{"name": "f", "parameters":'
        ' {"enum": [',
        each='{"a":9}',
        after="]}}}]}",
        most=90_000,
    ),
}


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
    large = LARGE[beside]()  # written once: this client must not stand still either

    async def send() -> None:
        while True:
            headers = {"Content-Type": "application/json"}
            async with open_stream("POST", parse_url(url), large.path, headers=headers, body=large.body) as answer:
                said = await answer.read()
                assert answer.status == large.status, (answer.status, said[:300])
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
    parser.add_argument("--only", choices=LARGE, action="append", help="beside this, not beside each; repeatable")
    asked = parser.parse_args()
    with ServerProcess(asked.model, "--kv-cache-memory", "256MiB", "--max-model-len", "2k", "--quiet") as server:
        asyncio.run(measure(server.url, 50, None))  # warms everything up
        rows = [asyncio.run(measure(server.url, asked.tokens, beside)) for beside in (None, *(asked.only or LARGE))]
    if asked.json:
        print(json.dumps({"schema": "octavo.bench.tokenise-stall/1", "gaps": [asdict(row) for row in rows]}))
        return 0
    print(f"{'beside the stream':<20}{'large prompts':>14}{'median gap ms':>15}{'longest gap ms':>16}")
    for row in rows:
        print(f"{row.beside:<20}{row.num_large_prompts:>14}{row.median_ms:>15.1f}{row.max_ms:>16.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
