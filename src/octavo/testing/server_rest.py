"""A server at rest: nothing runs, waits or holds a block, and every gauge says so."""

from __future__ import annotations

import asyncio
import json
import time

from octavo.testing.load_client import get

WAIT_S = 60.0
_GAUGES = (
    "octavo_requests_running",
    "octavo_requests_waiting",
    "octavo_kv_usage_ratio",
    "octavo_kv_fragmentation_ratio",
    'octavo_kv_blocks{state="referenced"',
    'octavo_kv_tokens{state="referenced"',
    'octavo_kv_bytes{state="referenced"',
)


async def read_metrics(url: str, headers: dict[str, str] | None = None) -> dict[str, float]:
    """Return every series of `/metrics` and its value."""
    status, body = await get(url, "/metrics", headers)
    assert status == 200, body
    lines = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def total(metrics: dict[str, float], name: str) -> float:
    """Return a metric's sum over its labels."""
    found = [value for series, value in metrics.items() if series.partition("{")[0] == name]
    assert found, f"there is no metric {name}"
    return sum(found)


async def wait_for_rest(url: str, headers: dict[str, str] | None = None) -> dict[str, float]:
    """Wait until nothing is left, and return the metrics then.

    Raises:
        AssertionError: something is left; says what.
    """
    deadline_s = time.monotonic() + WAIT_S
    while True:
        status, body = await get(url, "/kv", headers)
        assert status == 200, body
        pool = json.loads(body)
        metrics = await read_metrics(url, headers)
        left = {name: metrics[name] for name in metrics if name.startswith(_GAUGES) and metrics[name] != 0}
        totals = pool["totals"]
        if totals["referenced_blocks"]:
            left["blocks held, says /kv"] = totals["referenced_blocks"]
        if totals["num_running"] + totals["num_waiting"] + len(pool["requests"]):
            left["requests, says /kv"] = len(pool["requests"])
        if not left:
            return metrics
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        await asyncio.sleep(0.05)
