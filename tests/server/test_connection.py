"""Connections that only wait: they end, and none that is being answered does."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

import pytest

from octavo.server import connection
from octavo.testing.scripted_llm import LocalServer, scripted_llm

HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def server(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    llm = scripted_llm(tiny_model, lambda _: [70] * 30)
    llm.runner.pause_s = 0.05
    with LocalServer(llm) as running:
        yield running


def connect(server: LocalServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


@pytest.mark.parametrize("begun", [b"", b"G", HEAD])
def test_a_connection_without_a_whole_request_is_closed(server: LocalServer, begun: bytes):
    with contextlib.closing(connect(server)) as waiting:
        waiting.sendall(begun)
        assert waiting.recv(1000) == b""


def test_dribbling_a_head_does_not_keep_a_connection(server: LocalServer):
    def dribble(waiting: socket.socket) -> bool:
        """Whether the server closed it before we had enough, after twenty seconds."""
        for _ in range(400):
            try:
                waiting.sendall(b"X: a\r\n")
                if waiting.recv(1000) == b"":
                    return True
            except TimeoutError:
                continue
            except ConnectionError:
                return True
        return False

    with contextlib.closing(connect(server)) as waiting:
        waiting.sendall(HEAD)
        waiting.settimeout(0.05)
        assert dribble(waiting)


def test_a_second_head_has_to_come_too(server: LocalServer):
    with contextlib.closing(connect(server)) as waiting:
        waiting.sendall(HEAD + b"\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += waiting.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        waiting.sendall(HEAD)
        assert waiting.recv(1000) == b""


def test_an_answer_may_take_longer_than_a_head(server: LocalServer):
    body = b'{"prompt": "a", "max_tokens": 30, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.closing(connect(server)) as asking:
        asking.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            part = asking.recv(10_000)
            assert part, "closed in the middle of an answer"
            answer += part
        assert b"data: [DONE]" in answer
