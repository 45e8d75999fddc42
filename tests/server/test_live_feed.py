"""How many pages may look at once, however they come and go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from urllib.parse import urlsplit

import pytest

from octavo.server import live_feed
from octavo.server.errors import ApiError
from octavo.server.live_feed import LiveFeed
from octavo.testing.scripted_llm import LocalServer, scripted_llm


def test_a_stream_that_nobody_reads_takes_no_place_once_it_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_feed, "MAX_STREAMS", 2)

    async def take() -> dict:
        return {}

    async def look() -> None:
        feed = LiveFeed(take, lambda: False, period_s=0.01)
        for _ in range(3):
            unread, read = feed.open(), feed.open()
            await anext(read)
            with pytest.raises(ApiError):
                feed.open()
            await read.aclose()
            del unread, read
            gc.collect()

    asyncio.run(look())


def test_of_many_pages_at_once_some_are_told_to_come_back(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live_feed, "MAX_STREAMS", 4)
    with LocalServer(scripted_llm(tiny_model, lambda _: "ok")) as server:
        address = urlsplit(server.url)

        def look(num_pages: int) -> list[bytes]:
            """Ask for so many streams before any has begun; return the beginning of each answer, and leave."""
            with contextlib.ExitStack() as stack:
                pages = [
                    stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=20))
                    for _ in range(num_pages)
                ]
                for page in pages:
                    page.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return sorted(page.recv(12) for page in pages)

        deadline_s = time.monotonic() + 20
        assert look(9) == [b"HTTP/1.1 200"] * 4 + [b"HTTP/1.1 429"] * 5
        while look(4) != [b"HTTP/1.1 200"] * 4:
            assert time.monotonic() < deadline_s, "places of pages that were left are not free again"
