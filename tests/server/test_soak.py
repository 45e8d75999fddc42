"""A server that has answered many requests holds no more than one that has answered a few."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import pytest

from octavo.config.engine import EngineConfig
from octavo.core.events import RequestFinished
from octavo.llm.async_llm import AsyncLLM
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings

NUM_REQUESTS = 1200
"""In each round. The first fills what keeps a fixed number: a thousand explanations and ids, the last minute."""
MAX_OBJECTS_PER_REQUEST = 0.5
"""Objects that a request may leave, on average: one that stays for each request would be 1, whatever it is."""
IN_FLIGHT = 16
KEYS = tuple(f"key-{index}" for index in range(20))


@dataclass(slots=True)
class Told:
    """What the app told one client."""

    status: int = 0
    body: bytes = b""


class Client:
    """Calls an app as a web server would, without sockets: everything that stays is the app's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def call(
        self, method: str, path: str, *, headers: dict[str, str], body: bytes = b"", leaves_after: int | None = None
    ) -> Told:
        """Send a request; `leaves_after` so many pieces of the body, the client has gone."""
        told = Told()
        gone = asyncio.Event()
        received = [{"type": "http.request", "body": body, "more_body": False}]
        num_pieces = 0
        if leaves_after == 0:
            gone.set()

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal num_pieces
            if message["type"] == "http.response.start":
                told.status = message["status"]
                return
            told.body += message.get("body", b"")
            num_pieces += 1
            if leaves_after is not None and num_pieces >= leaves_after:
                gone.set()

        sent = {"host": "localhost", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await self._app(scope, receive, send)
        return told


def short_requests(random: Random) -> Iterator[dict[str, Any]]:
    """Yield arguments for `Client.call`: everything a client may choose is new each time."""
    while True:
        body: dict[str, Any] = {"max_tokens": random.randint(1, 4), "stream": random.random() < 0.5}
        is_chat = random.random() < 0.2
        if is_chat:
            body["messages"] = [{"role": "user", "content": f"say {random.random()}"}]
        else:
            body["prompt"] = [random.randrange(60, 400) for _ in range(random.randint(1, 20))]
        body |= random.choice(
            [
                {"seed": random.randrange(2**31)},
                {"temperature": 0.0},
                {"cache_salt": f"{random.random()}"},
                {"n": 2},
                {},
            ]
        )
        body |= {"model": f"no-{random.random()}"} if random.random() < 0.05 else {}
        key = random.choice(KEYS) if random.random() < 0.95 else f"wrong-{random.random()}"
        yield {
            "path": "/v1/chat/completions" if is_chat else "/v1/completions",
            "headers": {"authorization": f"Bearer {key}", "x-request-id": f"id-{random.random()}"},
            "body": json.dumps(body).encode(),
            "leaves_after": random.randint(0, 3) if random.random() < 0.1 else None,
        }


class Soak:
    """An app with a tiny model behind it, and rounds of requests."""

    def __init__(self, tiny_model: str) -> None:
        config = EngineConfig(model=tiny_model, num_blocks=64, max_model_len=256, threads=1)
        self.llm = AsyncLLM(config)
        settings = ServerSettings(api_key=KEYS, operator_key="operator")
        self.client = Client(create_app(self.llm, settings))
        self.random = Random(11)
        self.reasons: set[str] = set()
        self.statuses: set[int] = set()

    async def round(self) -> tuple[int, int, int]:
        """Send requests, come to rest, and return the objects alive, the series of metrics and the records kept."""
        seats = asyncio.Semaphore(IN_FLIGHT)

        async def one(arguments: dict[str, Any]) -> None:
            async with seats:
                told = await asyncio.wait_for(self.client.call("POST", **arguments), 30)
            self.statuses.add(told.status)

        # A task for each at once would be many objects, of which the allocator remembers the peak.
        asks = short_requests(self.random)
        for _ in range(NUM_REQUESTS // 100):
            await asyncio.gather(*map(one, islice(asks, 100)))
        async with asyncio.timeout(30):
            while await self.llm.call(lambda engine: engine.has_unfinished):  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.005)
        operator = {"authorization": "Bearer operator"}
        pool = json.loads((await self.client.call("GET", "/kv", headers=operator)).body)
        assert pool["totals"]["referenced_blocks"] == 0
        metrics = await self.client.call("GET", "/metrics", headers=operator)
        assert metrics.status == 200
        num_series = sum(not line.startswith(b"#") for line in metrics.body.splitlines())
        gc.collect()
        return sys.getallocatedblocks(), num_series, len(self.llm._explanations)

    def listen(self, events: Any) -> None:
        self.reasons.update(event.reason for event in events if isinstance(event, RequestFinished))


def test_objects_records_and_series_level_off(tiny_model: str, caplog: pytest.LogCaptureFixture):
    """Counted in the interpreter's own allocations, strings and numbers included."""
    soak = Soak(tiny_model)

    async def run() -> list[tuple[int, int, int]]:
        soak.llm.start()
        soak.llm.subscribe(soak.listen)
        try:
            return [await soak.round() for _ in range(3)]
        finally:
            await soak.llm.stop()

    objects, series, records = zip(*asyncio.run(run()), strict=True)

    assert soak.reasons == {"length", "stop", "abort"} and {200, 401, 404} <= soak.statuses, "not every kind was there"
    # What is kept differs in size from round to round, up or down; what leaks grows in each.
    least_growth = min(objects[1] - objects[0], objects[2] - objects[1])
    assert least_growth / NUM_REQUESTS < MAX_OBJECTS_PER_REQUEST
    assert len(set(series)) == 1
    assert set(records) == {1000}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "something was left alone"


@pytest.mark.parametrize("make", [str, lambda index: [index], lambda index: index + 10**9], ids=["text", "list", "int"])
def test_the_count_of_objects_would_see_a_leak(make: Callable[[int], object]):
    before = sys.getallocatedblocks()
    held = [make(index) for index in range(1000, 1000 + NUM_REQUESTS)]

    assert (sys.getallocatedblocks() - before) / len(held) > MAX_OBJECTS_PER_REQUEST
