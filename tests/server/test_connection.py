"""Connections that only wait: they end, and none that is being answered does."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from octavo.errors import InvalidParameterError
from octavo.server import connection, connection_limit
from octavo.server.connection_limit import resolve_max_connections
from octavo.server.settings import ServerSettings
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


def read_answer(asking: socket.socket) -> bytes:
    """Return one answer that says its length."""
    answer = b""
    while True:
        head, found, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower()) if found else None
        if length is not None and len(body) >= int(length[1]):
            return answer
        part = asking.recv(10_000)
        assert part, f"closed after {answer!r}"
        answer += part


def wait_for(question: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


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


# ---- an answer that came before the body, and clients that do not read ----


def test_the_rest_of_a_body_that_has_its_answer_has_to_come(server: LocalServer):
    """Dribbled without end, and left half sent: both were kept for ever once."""
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 100000\r\n\r\n"
    with contextlib.closing(connect(server)) as silent, contextlib.closing(connect(server)) as dribbling:
        for each in (silent, dribbling):
            each.sendall(head)
            assert b"HTTP/1.1 415" in read_answer(each)
        silent.sendall(b"a")
        dribbling.settimeout(0.05)
        for _ in range(400):
            try:
                dribbling.sendall(b"a")
                if dribbling.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("still open")
        assert silent.recv(1000) == b""


def test_a_connection_can_be_used_again_once_the_rest_of_such_a_body_came(server: LocalServer):
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n"
    with contextlib.closing(connect(server)) as asking:
        asking.sendall(head)
        assert b"HTTP/1.1 415" in read_answer(asking)
        asking.sendall(b"four")
        asking.settimeout(3 * connection.HEAD_TIMEOUT_S)
        with pytest.raises(TimeoutError):  # no timeout of a head: none has begun
            asking.recv(1000)
        asking.settimeout(20)
        asking.sendall(HEAD + b"\r\n")
        assert b"HTTP/1.1 200" in read_answer(asking)


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"])
def test_a_client_that_reads_nothing_is_given_up(server: LocalServer, monkeypatch: pytest.MonkeyPatch, ending: bytes):
    """Answers beyond what the system's buffers hold: the server waits for its reader, and then no more."""
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.3)
    with contextlib.closing(connect(server)) as deaf:
        deaf.settimeout(0.5)
        with contextlib.suppress(OSError):
            for _ in range(2000):  # some 25 MB of answers
                deaf.sendall(b"GET /static/style.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
            deaf.sendall(b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n" + ending + b"\r\n")
        wait_for(lambda: not server.connections)


def test_a_slow_reader_is_not_given_up(server: LocalServer, monkeypatch: pytest.MonkeyPatch):
    """It reads a little within each time to read, far less than what is written anew into the system's buffer."""
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.3)
    request = b"GET /static/style.css HTTP/1.1\r\nHost: localhost\r\n"
    num_asked = 1000
    with contextlib.closing(connect(server)) as slow:
        sending = threading.Thread(
            target=lambda: slow.sendall((request + b"\r\n") * num_asked + request + b"Connection: close\r\n\r\n")
        )
        sending.start()
        answer = bytearray()
        start_s = time.monotonic()
        while part := slow.recv(100_000):
            answer += part
            if time.monotonic() - start_s < 2:
                time.sleep(0.1)
        sending.join()
        assert answer.count(b"HTTP/1.1 200") == num_asked + 1, f"cut after {len(answer)} bytes"


# ---- too many ----


@pytest.fixture
def crowded(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection_limit, "SPARE", 2)
    monkeypatch.setattr(connection, "BEYOND_TIMEOUT_S", 0.5)
    llm = scripted_llm(tiny_model, lambda _: [70] * 30)
    with LocalServer(llm, ServerSettings(max_connections=3)) as running:
        yield running


def test_connections_beyond_the_limit_are_told_so_and_closed(crowded: LocalServer):
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(contextlib.closing(connect(crowded))) for _ in range(3)]
        beyond = stack.enter_context(contextlib.closing(connect(crowded)))
        probe = stack.enter_context(contextlib.closing(connect(crowded)))
        wait_for(lambda: len(crowded.connections) == 5)
        far_beyond = stack.enter_context(contextlib.closing(connect(crowded)))
        with contextlib.suppress(ConnectionError):
            assert far_beyond.recv(1000) == b""

        beyond.sendall(HEAD + b"\r\n")
        answer = read_answer(beyond)
        assert b"HTTP/1.1 503" in answer and b"retry-after: 1" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "too-many-connections" and error["type"] == "service_unavailable_error"
        assert beyond.recv(1000) == b""

        probe.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" in read_answer(probe), "who asks for health must not take a full server for a dead one"
        assert probe.recv(1000) == b""

        for each in taken:
            each.sendall(HEAD + b"\r\n")
            assert b"HTTP/1.1 200" in read_answer(each)


def test_a_connection_beyond_the_limit_that_says_nothing_is_closed_soon(crowded: LocalServer):
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(contextlib.closing(connect(crowded)))
        beyond = stack.enter_context(contextlib.closing(connect(crowded)))
        assert beyond.recv(1000) == b""


def test_an_idle_connection_makes_room_for_a_new_one(crowded: LocalServer):
    with contextlib.ExitStack() as stack:
        first, *others = [stack.enter_context(contextlib.closing(connect(crowded))) for _ in range(3)]
        first.sendall(HEAD + b"\r\n")
        assert b"HTTP/1.1 200" in read_answer(first)
        newest = stack.enter_context(contextlib.closing(connect(crowded)))
        assert first.recv(1000) == b""
        for each in (newest, *others):
            each.sendall(HEAD + b"\r\n")
            assert b"HTTP/1.1 200" in read_answer(each)


def test_the_process_may_open_as_many_files_as_connections_need(monkeypatch: pytest.MonkeyPatch):
    limits = {"soft": 256, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, pair: limits.update(soft=pair[0], hard=pair[1]))

    assert resolve_max_connections(None, max_waiting=1024) == 2048
    assert 2048 < limits["soft"] < 4096 == limits["hard"]
    assert resolve_max_connections(None, max_waiting=100_000) < 4096 == limits["soft"]
    with pytest.raises(InvalidParameterError) as caught:
        resolve_max_connections(4096, max_waiting=1)
    fits = int(caught.value.hints[1].split()[2])
    assert resolve_max_connections(fits, max_waiting=1) == fits


# ---- what is no HTTP ----

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NO_HTTP = {
    "words": (b"hello there, server\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "a space in the path": (b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a space before the colon": (b"GET /version HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    "a control character": (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "no length": (POST + b"Content-Length: two\r\n\r\n{}", 400),
    "an unknown transfer coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", 501),
    "a bad chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
    "an endless head": (b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000, 431),
    "a long path": (b"GET /" + b"a" * 100_000, 431),
}


@pytest.fixture(scope="module")
def plain(tiny_model: str):
    with LocalServer(scripted_llm(tiny_model, lambda _: "ok")) as running:
        yield running


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_answered_in_the_shape_of_all_errors(plain: LocalServer, name: str):
    sent, status = NO_HTTP[name]
    with contextlib.closing(connect(plain)) as asking:
        with contextlib.suppress(ConnectionError):
            asking.sendall(sent)
        answer = read_answer(asking)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status), answer
        assert b"content-type: application/json" in head and b"x-request-id: " in head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert asking.recv(1000) == b""


def test_rubbish_after_a_request_ends_the_connection_and_nothing_else(server: LocalServer):
    """The second of two pipelined requests is no HTTP; and a body breaks after its request had been refused."""
    with contextlib.closing(connect(server)) as asking:
        asking.sendall(HEAD + b"\r\nrubbish\r\n\r\n")
        answer = b""
        while part := asking.recv(10_000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" in answer
    with contextlib.closing(connect(server)) as asking:
        asking.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"HTTP/1.1 415" in read_answer(asking)
        asking.sendall(b"rubbish\r\n")
        assert asking.recv(1000) == b""
    wait_for(lambda: not server.connections)
