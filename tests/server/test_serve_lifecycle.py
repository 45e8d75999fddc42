"""A server process from its first answer to its end: loading, draining, signals, failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from octavo.server.settings import ServerSettings
from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import SMALL, ServerProcess
from octavo.testing.sse import split_events

ENDLESS = {"prompt": "go", "max_tokens": 900, "ignore_eos": True, "stream": True}


class OpenStream:
    """A stream that is being read in a thread."""

    def __init__(self, url: str, body: dict | None = None) -> None:
        self.text = ""
        self.failure: Exception | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, body or ENDLESS), daemon=True)
        self._thread.start()
        assert self._begun.wait(30), self.failure

    def end(self) -> list[str]:
        """Wait for the end; return the data of each event."""
        self._thread.join(30)
        assert not self._thread.is_alive() and self.failure is None, self.failure
        return split_events(self.text)[0]

    def _read(self, url: str, body: dict) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for part in answer.iter_text():
                    self.text += part
                    self._begun.set()
        except Exception as error:  # noqa: BLE001 - told to the test
            self.failure = error
        finally:
            self._begun.set()


def slow_server(tiny_model: str, *args: str) -> ServerProcess:
    """A real process whose answers take a while: the reference runner on one thread."""
    return ServerProcess(tiny_model, *SMALL, "--runner", "reference", *args)


LOADS_FOR_EVER = """
import sys, threading
from octavo.server.lifecycle import Lifecycle
from octavo.server.settings import ServerSettings
load = lambda: threading.Event().wait()
tell = lambda address: print(address, flush=True)
settings = ServerSettings(port=0, api_key=("k",))
sys.exit(Lifecycle(load, settings, on_listening=tell, on_ready=lambda *_: None).run())
"""


def test_the_socket_answers_while_the_model_is_loaded():
    with subprocess.Popen([sys.executable, "-c", LOADS_FOR_EVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            key = {"Authorization": "Bearer k"}
            health = httpx.get(f"{url}/health")
            ready = httpx.get(f"{url}/ready", headers=key)
            asked = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=key)
            unknown = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
            process.send_signal(signal.SIGTERM)

            assert process.wait(10) == 0, "a signal while loading ends it at once"
        finally:
            process.kill()

    assert health.json() == {"status": "loading"}
    assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
    assert asked.status_code == 503 and asked.headers["retry-after"] and asked.json()["error"]["code"] == "loading"
    assert unknown.status_code == 401, "the door is there from the first moment"


def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_error(tmp_path: Path):
    with pytest.raises(AssertionError, match="model-not-found"):
        ServerProcess(str(tmp_path / "nothing.gguf")).__enter__()


def test_a_drain_lets_running_answers_end_and_takes_no_new_ones(tiny_model: str):
    with slow_server(tiny_model) as server:
        streams = [OpenStream(server.url, {**ENDLESS, "max_tokens": 300}) for _ in range(3)]
        server.signal(signal.SIGTERM)
        ready = server.wait_for(lambda: (got := httpx.get(f"{server.url}/ready")).status_code == 503 and got)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        ends = [stream.end() for stream in streams]

        assert server.wait() == 0

    assert ready.json() == {"status": "draining"}
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine-stopped"
    assert [events[-1] for events in ends] == ["[DONE]"] * 3
    assert all('"finish_reason":"length"' in events[-2] for events in ends)


def test_a_drain_has_an_end_and_streams_are_told(tiny_model: str):
    with slow_server(tiny_model, "--drain-timeout", "0.3") as server:
        streams = [OpenStream(server.url) for _ in range(3)]
        server.signal(signal.SIGTERM)
        ends = [stream.end() for stream in streams]

        assert server.wait(10) == 0

    for events in ends:
        assert json.loads(events[-1])["error"]["code"] == "request-aborted", "an error, not silence"


def test_a_closed_terminal_drains_too_and_nohup_goes_on(tiny_model: str):
    # What is ignored stays so in processes that are started; these tests may run under nohup themselves.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with slow_server(tiny_model, "--drain-timeout", "0.1") as server:
            answer = OpenStream(server.url)
            server.signal(signal.SIGHUP)
            assert json.loads(answer.end()[-1])["error"]["code"] == "request-aborted"
            assert server.wait(10) == 0
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ServerProcess(tiny_model, *SMALL) as server:
            server.signal(signal.SIGHUP)
            server.signal(signal.SIGHUP)
            assert httpx.get(f"{server.url}/ready").status_code == 200
            assert server.exit_code is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tiny_model: str, which: signal.Signals):
    """Eight streams, and one client that reads nothing."""
    with slow_server(tiny_model, "--drain-timeout", "60") as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(ENDLESS).encode()
        lazy = socket.create_connection((host, int(port)))
        lazy.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        streams = [OpenStream(server.url) for _ in range(8)]
        start_s = time.monotonic()
        server.signal(which)
        server.wait_for(lambda: "draining" in server.log)
        server.signal(which)
        ends = [stream.end() for stream in streams]

        assert server.wait(10) == (130 if which is signal.SIGINT else 143)
        assert time.monotonic() - start_s < 10
        lazy.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")

    assert all("error" in json.loads(events[-1]) for events in ends)


def test_an_idle_server_ends_at_the_first_signal_and_its_port_is_free(tiny_model: str):
    with ServerProcess(tiny_model, *SMALL) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with httpx.Client(base_url=server.url) as kept_alive:
            assert kept_alive.get("/health").status_code == 200
            server.signal(signal.SIGTERM)
            assert server.wait(10) == 0
    with contextlib.closing(socket.socket()) as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_killed_server_leaves_nothing_that_a_new_one_minds(tiny_model: str):
    with slow_server(tiny_model) as server:
        OpenStream(server.url)
        server.kill()
    with ServerProcess(tiny_model, *SMALL) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_taken_port_is_an_error_that_says_so(tiny_model: str):
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = _octavo("serve", tiny_model, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1 and "cannot listen" in done.stderr and "--port 0" in done.stderr


def test_health_answers_while_a_long_prompt_is_computed(tiny_model: str):
    with slow_server(tiny_model, "--max-num-batched-tokens", "512") as server:
        stream = OpenStream(server.url, {"prompt": [7] * 900, "max_tokens": 2, "stream": True})
        start_s = time.monotonic()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert time.monotonic() - start_s < 5
        stream.end()


def test_a_stalled_engine_is_unwell_and_well_again_once_it_moves(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "hello", stall_s=0.2)
    with LocalServer(llm) as server:
        llm.runner.gate.clear()
        sending = threading.Thread(
            target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": {"prompt": "a"}}
        )
        sending.start()
        stalled = _wait_for(lambda: (got := httpx.get(f"{server.url}/health")).status_code == 503 and got)
        ready = httpx.get(f"{server.url}/ready")
        llm.runner.gate.set()
        sending.join()
        well = httpx.get(f"{server.url}/health")

    assert stalled.json() == {"status": "stalled"} and ready.status_code == 503
    assert (well.status_code, well.json()) == (200, {"status": "ok"})


def test_a_dead_engine_is_unwell_and_answers_everyone(tiny_model: str):
    """Three failed steps in a row are fatal: what waits is told, health says so, and new requests are refused."""
    llm = scripted_llm(tiny_model, lambda _: "hello")
    with LocalServer(llm) as server:
        llm.runner.failure = RuntimeError("broken for good")
        statuses = [httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code for _ in range(5)]
        health = httpx.get(f"{server.url}/health")
        ready = httpx.get(f"{server.url}/ready")

    assert set(statuses) <= {500, 503} and statuses[-1] == 503
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert ready.status_code == 503


def test_the_start_says_where_it_is_and_how_to_ask(tiny_model: str):
    with ServerProcess(tiny_model, *SMALL, "--served-model-name", "first", "--served-model-name", "second") as server:
        assert server.document["schema"] == "octavo.serve/1" and server.document["models"] == ["first", "second"]
        curl = next(line for line in server.log.splitlines() if line.startswith("curl "))
        done = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, check=True, timeout=60)
        names = [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]]

    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
    assert names == ["first", "second"]


def test_the_log_has_no_prompt_and_no_answer(tiny_model: str):
    with ServerProcess(tiny_model, *SMALL, "--log-format", "json") as server:
        answer = httpx.post(
            f"{server.url}/v1/completions?q=zebra", json={"prompt": "zebra zebra"}, headers={"X-Request-Id": "mine"}
        )
        bad = httpx.post(f"{server.url}/v1/completions", json={"prompt": "zebra", "zebra": 1})
        server.wait_for(lambda: server.log.count('"path"') >= 2)
        log = server.log
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]

    assert answer.status_code == 200 and bad.status_code == 400
    assert "zebra" not in log
    (line,) = [line for line in lines if line.get("request_id") == "mine"]
    assert line["status"] == 200 and line["path"] == "/v1/completions" and line["duration_s"] > 0


def test_a_quiet_server_says_nothing(tiny_model: str):
    with ServerProcess(tiny_model, *SMALL, "-q") as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200
        assert server.log == ""


def test_a_full_queue_is_a_429_that_says_when_to_come_back(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "hello", max_num_seqs=1, max_waiting=1)
    llm.runner.gate.clear()
    with LocalServer(llm, ServerSettings()) as server:
        streams = [
            threading.Thread(
                target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": {"prompt": "a"}}
            )
            for _ in range(2)
        ]
        for stream in streams:
            stream.start()
        _wait_for(lambda: llm.health.num_running + llm.health.num_waiting == 2)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"})
        streamed = httpx.post(f"{server.url}/v1/completions", json={"prompt": "b", "stream": True})
        llm.runner.gate.set()
        for stream in streams:
            stream.join()

    for answer in (refused, streamed):
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"


def _wait_for(question):
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        answer = question()
        if answer:
            return answer
        time.sleep(0.01)
    raise TimeoutError


def _octavo(*args: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "octavo", *args], env=kept, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow  # what sockets hold has to be exceeded: 10 MB of answer
def test_a_slow_reader_has_the_time_of_the_drain_to_read_its_answer(tiny_model: str):
    """It reads only after the answer has been computed and the drain is over, and gets all of it."""
    # About 10 MB: more than the sockets on the way can hold.
    body = {"prompt": "go", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 16}
    with ServerProcess(tiny_model, "--threads", "1", "--num-blocks", "1024", "--max-model-len", "1024") as server:
        host, port = server.url.removeprefix("http://").split(":")
        data = json.dumps(body).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(data) + data
            )
            assert slow.recv(100)
            server.signal(signal.SIGTERM)
            time.sleep(3)  # longer than what a stopping server gives readers at the very end
            received = b""
            while part := slow.recv(65536):
                received += part

        assert server.wait(30) == 0

    assert len(received) > 6_000_000
    assert b"data: [DONE]" in received[-100:]
