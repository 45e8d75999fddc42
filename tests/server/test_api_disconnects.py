"""Clients that leave, in every phase: their requests end, their blocks are free, and nothing is computed for them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import httpx
import pytest

from octavo.core.events import RequestArrived, RequestFinished
from octavo.testing.scripted_llm import LocalServer, ScriptedLLM, scripted_llm

NUM_CLIENTS = 40
LONG = list(range(60, 400))
"""More than five chunks of 64 tokens."""


class Books:
    """Counts what arrived and what ended."""

    def __init__(self, llm: ScriptedLLM) -> None:
        self.num_arrived = 0
        self.reasons: list[str] = []
        llm.subscribe(self._take)

    def _take(self, events: object) -> None:
        for event in events:
            self.num_arrived += isinstance(event, RequestArrived)
            if isinstance(event, RequestFinished):
                self.reasons.append(event.reason)


def send(server: LocalServer, body: dict, early: bytes = b"") -> socket.socket:
    """Send a request, and what the next one begins with; read nothing."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)))
    made.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data + early
    )
    return made


def wait_for(question: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def check_at_rest(server: LocalServer, llm: ScriptedLLM, books: Books, num_sent: int) -> None:
    """Nothing runs or waits, no block is held, no step is done for nobody; then the whole pool can be used."""
    wait_for(lambda: llm.health.num_running == llm.health.num_waiting == 0)
    wait_for(lambda: len(books.reasons) == books.num_arrived == num_sent)
    pool = httpx.get(f"{server.url}/kv").json()
    assert pool["totals"]["referenced_blocks"] == 0
    num_steps = len(llm.runner.plans)
    time.sleep(0.2)  # long enough for a hundred steps of this runner
    assert len(llm.runner.plans) == num_steps
    whole = httpx.post(f"{server.url}/v1/completions", json={"prompt": [9] * 500, "max_tokens": 12, "ignore_eos": True})
    assert whole.status_code == 200


@pytest.fixture
def llm(tiny_model: str) -> ScriptedLLM:
    return scripted_llm(tiny_model, lambda _: [70] * 400, num_blocks=32, max_num_seqs=4, max_waiting=1000)


def test_clients_that_leave_while_queued_or_before_a_byte(llm: ScriptedLLM):
    """Four are being computed (their prompts need many chunks), the others wait; all leave."""
    llm.runner.gate.clear()
    with LocalServer(llm) as server:
        books = Books(llm)
        clients = [
            send(server, {"prompt": LONG, "max_tokens": 50, "stream": index % 2 == 0}) for index in range(NUM_CLIENTS)
        ]
        wait_for(lambda: llm.health.num_running + llm.health.num_waiting == NUM_CLIENTS)
        for client in clients:
            client.close()
        wait_for(lambda: not server.connections)
        llm.runner.gate.set()
        check_at_rest(server, llm, books, NUM_CLIENTS)

        # The one step that stood at the gate when they left may have been finished, and no more than one after it.
        assert books.reasons[:NUM_CLIENTS] == ["abort"] * NUM_CLIENTS


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_clients_that_leave_in_the_middle_of_an_answer(llm: ScriptedLLM, stream: bool):
    llm.runner.pause_s = 0.002
    with LocalServer(llm) as server:
        books = Books(llm)
        for _ in range(NUM_CLIENTS // 4):
            clients = [send(server, {"prompt": [70 + i], "max_tokens": 400, "stream": stream}) for i in range(4)]
            if stream:
                for client in clients:
                    assert client.recv(100).startswith(b"HTTP/1.1 200")
            wait_for(lambda: llm.health.num_running == 4)
            for client in clients:
                client.close()
            wait_for(lambda: llm.health.num_running == 0)
        check_at_rest(server, llm, books, NUM_CLIENTS)

        assert books.reasons[:NUM_CLIENTS] == ["abort"] * NUM_CLIENTS


@pytest.mark.parametrize("early", [b"\r\n", b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3])
def test_a_client_that_asks_on_before_it_has_its_answer_can_leave_too(llm: ScriptedLLM, early: bytes):
    """Whoever does not read what came too early does not see that the connection has been closed, either."""
    llm.runner.pause_s = 0.002
    with LocalServer(llm) as server:
        books = Books(llm)
        client = send(server, {"prompt": [70], "max_tokens": 400}, early)
        wait_for(lambda: llm.health.num_running == 1)
        client.sendall(early)
        client.close()
        check_at_rest(server, llm, books, 1)
        assert books.reasons[0] == "abort"


def test_what_comes_too_early_is_bounded(llm: ScriptedLLM):
    llm.runner.gate.clear()
    with LocalServer(llm) as server:
        client = send(server, {"prompt": [70], "max_tokens": 2})
        wait_for(lambda: llm.health.num_running + llm.health.num_waiting == 1)
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000)
        [connection] = server.connections
        assert len(connection.conn.trailing_data[0]) < 1024 * 1024
        llm.runner.gate.set()
        client.close()
        wait_for(lambda: llm.health.num_running + llm.health.num_waiting == 0)


def test_one_of_many_answers_to_a_client_that_left_leaves_nothing_behind(llm: ScriptedLLM):
    """Several prompts and several answers each: one connection, many requests of the engine."""
    llm.runner.pause_s = 0.002
    with LocalServer(llm) as server:
        books = Books(llm)
        client = send(server, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 400, "stream": True})
        assert client.recv(100)
        wait_for(lambda: llm.health.num_running == 4)
        client.close()
        check_at_rest(server, llm, books, 6)


def test_a_client_that_reads_slowly_holds_up_nobody_and_no_memory(tiny_model: str):
    """It stops reading; a thousand tokens later everyone else has been served, and its own answer is still whole."""
    llm = scripted_llm(tiny_model, lambda _: [70] * 1500, num_blocks=512, max_model_len=2048, max_num_seqs=4)
    with LocalServer(llm) as server:
        body = {"prompt": [71], "max_tokens": 1500, "stream": True, "logprobs": 5}
        slow = send(server, body)
        assert slow.recv(100)
        others = [
            httpx.post(f"{server.url}/v1/completions", json={"prompt": [72], "max_tokens": 300}) for _ in range(3)
        ]
        wait_for(lambda: llm.health.num_running == 0)
        data = b""
        while b"[DONE]" not in data[-100:]:
            data += slow.recv(1 << 20)
        slow.close()

    assert {answer.status_code for answer in others} == {200}
    text = data.decode()
    events = [line for line in text.splitlines() if line.startswith("data: {")]
    spelled = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)
    assert len(spelled) == 1500, "merged, not lost"
