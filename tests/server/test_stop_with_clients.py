"""A server that stops while its clients do nothing: it waits for none of them, and says nothing wrong in its log."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from octavo.testing.server_process import SMALL, ServerProcess

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def connect(server: ServerProcess, sent: bytes) -> socket.socket:
    address = urlsplit(server.url)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(30)
    made.connect((address.hostname, address.port))
    made.sendall(sent)
    return made


def check_log(server: ServerProcess) -> None:
    log = server.log
    assert log.endswith("stopped\n"), log
    assert "Traceback" not in log and "error" not in log, log


def wait_for_text(server: ServerProcess, text: str) -> None:
    server.wait_for(lambda: text in server.log)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_half_a_request_is_answered_and_a_silent_client_is_closed(tiny_model: str, num_signals: int):
    with ServerProcess(tiny_model, *SMALL) as server, contextlib.ExitStack() as stack:
        half, silent, half_a_head = [
            stack.enter_context(contextlib.closing(connect(server, sent)))
            for sent in (HEAD % 100 + b'{"prompt": ', b"", HEAD[:40])
        ]
        assert httpx.get(f"{server.url}/health").status_code == 200  # by then, the others have been taken in
        for _ in range(num_signals):
            server.signal(signal.SIGTERM)

        answer = b""
        while part := half.recv(10_000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "stopping"
        assert silent.recv(1000) == half_a_head.recv(1000) == b""
        assert server.wait() in (0, 143)
        check_log(server)
        assert "ended=client gone" in server.log


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_client_that_does_not_read_keeps_no_server_from_stopping(tiny_model: str, num_signals: int):
    """Its answer is there, megabytes of it, beyond what the system takes."""
    body = {"prompt": "a", "n": 16, "max_tokens": 500, "logprobs": 20, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    with ServerProcess(tiny_model, *SMALL, "--drain-timeout", "1" if num_signals == 1 else "20") as server:
        with contextlib.closing(connect(server, HEAD % len(data) + data)):
            server.wait_for(lambda: has_ended(httpx.get(f"{server.url}/metrics").text))
            start_s = time.monotonic()
            for count in range(1, num_signals + 1):
                server.signal(signal.SIGTERM)
                wait_for_text(server, "draining for" if count == 1 else "stopping at once")
            assert server.wait() == (0 if num_signals == 1 else 143)
            assert time.monotonic() - start_s < 15
        check_log(server)


def has_ended(figures: str) -> bool:
    ends = [line for line in figures.splitlines() if line.startswith("octavo_requests_finished_total")]
    return sum(float(line.rpartition(" ")[2]) for line in ends) == 16


def test_who_leaves_in_the_middle_of_a_body_has_left(tiny_model: str):
    with ServerProcess(tiny_model, *SMALL) as server:
        connect(server, HEAD % 100 + b'{"prompt": ').close()
        wait_for_text(server, "ended=client gone")
        assert " 499 " in server.log


@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_without_end_change_nothing_about_the_end(tiny_model: str, which: signal.Signals, code: int):
    """Impatient people press Ctrl-C again, also while the process is about to exit."""
    with ServerProcess(tiny_model, *SMALL) as server:
        deadline_s = time.monotonic() + 30
        while server.exit_code is None:
            server.signal(which)
            time.sleep(0.005)
            assert time.monotonic() < deadline_s
        assert server.exit_code == code
        check_log(server)
