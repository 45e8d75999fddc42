"""What a server does under load: times at rising rates, and that nobody is lost and no answer changes when it is hard.

    PYTHONPATH=src python benchmarks/serve_load.py [--model smollm2-135m] [--workload FILE] [--rates 2,4,8]
        [--streams 200] [--only rates,streams,leaving,restart] [--json]

rates     the workload with Poisson arrivals at each rate, as ordinary streams: TTFT, inter-token and whole times
streams   200 streams at once in a pool of 64 MiB, half of them seeded, half with a shared beginning
leaving   the workload at the highest rate, a third of the clients gone at random times
restart   killed with SIGKILL amid streams, started again on its port: seconds until an answer's first token

Beforehand every answer is computed alone, one after the other, without a prefix cache. Fails if a request is lost, if
an answer differs by a bit, or if the server at rest holds a block, a request or a gauge that is not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.engine.metrics import spread
from octavo.llm.http_stream import parse_url
from octavo.llm.offline import LLM
from octavo.llm.offline_bench import WorkloadRequest, read_workload
from octavo.testing.known_load import (
    KnownAnswer,
    KnownRequest,
    check_load,
    compute_alone,
    leaving_times,
    random_requests,
)
from octavo.testing.load_client import Ask, Heard, hear, poisson, send_all
from octavo.testing.server_process import ServerProcess, free_port
from octavo.testing.server_rest import total, wait_for_rest

WORKLOAD = Path(__file__).with_name("workloads") / "mixed.json"
OPTIONS = ("--max-model-len", "2k", "--enable-operator", "--quiet")
ROOMY = (*OPTIONS, "--kv-cache-memory", "512MiB")
SMALL_POOL = (*OPTIONS, "--kv-cache-memory", "64MiB", "--max-waiting", "1024")
VOCAB = range(1000, 40_000)
SEED = 20

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Requests of the workload with their answers, and what is asked of the runs."""

    model: str
    requests: Sequence[KnownRequest]
    alone: Sequence[KnownAnswer]
    rates: Sequence[float]
    num_streams: int


def rates(campaign: Campaign) -> list[Row]:
    """Run the workload at each rate, on a server without anything in its cache."""
    rows = []
    for rate in campaign.rates:
        due_s = poisson(len(campaign.requests), rate_per_s=rate, seed=SEED)
        asks = [
            request.ask(due_s=due, with_scores=False) for request, due in zip(campaign.requests, due_s, strict=True)
        ]
        rows.append(_run(f"{rate:g} requests/s", campaign.model, ROOMY, asks, campaign.alone, with_scores=False))
    return rows


def streams(campaign: Campaign) -> list[Row]:
    """Open many streams at once in a small pool."""
    requests = random_requests(
        campaign.num_streams,
        seed=SEED,
        vocab=VOCAB,
        max_prompt_tokens=120,
        max_output_tokens=48,
        num_shared_tokens=100,
    )
    alone = _alone(campaign.model, requests)
    asks = [request.ask() for request in requests]
    return [_run(f"{campaign.num_streams} streams at once, 64 MiB", campaign.model, SMALL_POOL, asks, alone)]


def leaving(campaign: Campaign) -> list[Row]:
    """Let a third of the clients leave at random times."""
    due_s = poisson(len(campaign.requests), rate_per_s=max(campaign.rates), seed=SEED)
    leaves_s = leaving_times(len(campaign.requests), seed=SEED, longest_s=8.0)
    asks = [
        request.ask(due_s=due, leaves_after_s=leaves)
        for request, due, leaves in zip(campaign.requests, due_s, leaves_s, strict=True)
    ]
    return [_run("a third leaves, 64 MiB", campaign.model, SMALL_POOL, asks, campaign.alone)]


def restart(campaign: Campaign) -> list[Row]:
    """Kill a server amid streams; start it again on its port, and wait for the first token of an answer."""
    port = free_port()
    first, known = campaign.requests[0], campaign.alone[0]
    with ServerProcess(campaign.model, *ROOMY, port=port) as server:
        asyncio.run(_kill_amid_streams(server, campaign.requests[:8]))
    start_s = time.perf_counter()
    with ServerProcess(campaign.model, *ROOMY, port=port) as server:
        ready_s = time.perf_counter() - start_s
        heard = asyncio.run(hear(parse_url(server.url), first.ask(), start_s=start_s))
        check_load([heard], [known])
    return [{"run": "restart after SIGKILL", "ready_s": ready_s, "first_token_s": heard.chunk_s[0]}]


RUNS: dict[str, Callable[[Campaign], list[Row]]] = {
    "rates": rates,
    "streams": streams,
    "leaving": leaving,
    "restart": restart,
}


async def _kill_amid_streams(server: ServerProcess, requests: Sequence[KnownRequest]) -> None:
    sending = asyncio.create_task(send_all(server.url, [request.ask() for request in requests]))
    first = await hear(parse_url(server.url), requests[0].ask(), start_s=time.perf_counter())
    assert first.fate == "answered" and not sending.done(), "the streams were over too early"
    server.signal(signal.SIGKILL)
    assert any(one.fate == "lost" for one in await sending)


def _run(
    name: str,
    model: str,
    options: Sequence[str],
    asks: Sequence[Ask],
    alone: Sequence[KnownAnswer],
    *,
    with_scores: bool = True,
) -> Row:
    """Put a load on a new server and check everything about it."""
    with ServerProcess(model, *options) as server:
        heard, metrics = asyncio.run(_load(server.url, asks))
    fates = check_load(heard, alone, with_scores=with_scores)
    return {
        "run": name,
        "num_requests": len(asks),
        "ends": dict(fates),
        "num_preemptions": round(total(metrics, "octavo_preemptions_total")),
        "num_hit_tokens": round(total(metrics, "octavo_prefix_hit_tokens_total")),
        **_times(heard),
    }


async def _load(url: str, asks: Sequence[Ask]) -> tuple[list[Heard], dict[str, float]]:
    heard = await send_all(url, asks)
    return heard, await wait_for_rest(url)


def _times(heard: Sequence[Heard]) -> Row:
    whole = [one for one in heard if one.fate == "answered" and one.chunk_s]
    wall_s = max(one.done_s for one in heard)
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": sum(one.num_tokens for one in whole) / wall_s,
        "ttft_s": spread([one.chunk_s[0] - one.sent_s for one in whole])._asdict(),
        "itl_s": spread([after - before for one in whole for before, after in pairwise(one.chunk_s)])._asdict(),
        "e2e_s": spread([one.done_s - one.sent_s for one in whole])._asdict(),
    }


def _alone(model: str, requests: Sequence[KnownRequest]) -> list[KnownAnswer]:
    llm = LLM(model, kv_cache_memory="64MiB", max_model_len=2048, enable_prefix_caching=False)
    return compute_alone(llm, requests)


def _known(request: WorkloadRequest, index: int) -> KnownRequest:
    seed = index if index % 2 else None
    return KnownRequest(prompt_token_ids=request.prompt_token_ids, max_tokens=request.max_tokens, seed=seed)


def _text(row: Row) -> str:
    if "ends" not in row:
        return f"{row['run']}: ready after {row['ready_s']:.2f} s, first token after {row['first_token_s']:.2f} s"
    ends = ", ".join(f"{count} {end}" for end, count in row["ends"].items())
    told = f"{row['num_preemptions']} preemptions, {row['num_hit_tokens']:,} tokens hit"
    speed = f"{row['output_tokens_per_s']:.0f} output tokens/s, {row['wall_s']:.0f} s"
    lines = [f"{row['run']}: {ends}; {told}; {speed}"]
    for name in ("ttft_s", "itl_s", "e2e_s"):
        cells = "".join(f"{label:>6} {row[name][label]:.3f}" for label in ("mean", "p50", "p90", "p99"))
        lines.append(f"    {name:<7}{cells}")
    return "\n".join(lines)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workload", type=Path, default=WORKLOAD, metavar="FILE")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of the workload")
    parser.add_argument("--rates", default="2,4,8", metavar="R,R", help="requests a second")
    parser.add_argument("--streams", type=int, default=200, metavar="N")
    parser.add_argument("--only", default=",".join(RUNS), metavar="RUN,RUN")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    workload = read_workload(asked.workload)[: asked.requests]
    requests = [_known(request, index) for index, request in enumerate(workload)]
    print(f"computing {len(requests)} answers alone", file=sys.stderr)
    campaign = Campaign(
        model=asked.model,
        requests=requests,
        alone=_alone(asked.model, requests),
        rates=[float(rate) for rate in asked.rates.split(",")],
        num_streams=asked.streams,
    )
    rows: list[Row] = []
    for name in asked.only.split(","):
        for row in RUNS[name](campaign):
            rows.append(row)
            print(_text(row), file=sys.stderr if asked.json else sys.stdout, flush=True)
    if asked.json:
        print(json.dumps({"schema": "octavo.bench.serve-load/1", "model": asked.model, "runs": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
