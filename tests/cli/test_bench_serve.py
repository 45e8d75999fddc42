"""`octavo bench serve`: against a server that a test scripts, so that every way it can fail is one that it did."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from octavo.llm.offline_bench import WorkloadRequest
from octavo.llm.serve_load import arrivals

NUM_REQUESTS = 6


class Script:
    """How the server answers; what it was asked."""

    def __init__(self) -> None:
        self.takes_ids = True
        self.takes_ignore_eos = True
        self.key: str | None = None
        self.is_chunked = True
        self.failures: dict[int, str] = {}
        self.bodies: list[dict] = []
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = self.num_streams = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        if self.script.key and self.headers["Authorization"] != f"Bearer {self.script.key}":
            self._json(401, {"error": {"message": "a key is wanted"}})
            return
        self._json(200, {"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = self.script
        with script.lock:
            script.bodies.append(body)
        if isinstance(body["prompt"], list) and not script.takes_ids:
            self._json(400, {"error": {"message": "prompt must be text"}})
        elif "ignore_eos" in body and not script.takes_ignore_eos:
            self._json(400, {"error": {"message": "ignore_eos is unknown"}})
        elif not body.get("stream"):
            self._json(200, {"choices": [{"text": "a"}]})
        else:
            self._stream(body)

    def _stream(self, body: dict) -> None:
        script = self.script
        with script.lock:
            failure = script.failures.get(script.num_streams)
            script.num_streams += 1
            script.in_flight += 1
            script.most_in_flight = max(script.most_in_flight, script.in_flight)
        try:
            if failure == "429":
                self._json(429, {"error": {"message": "later"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            if script.is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.close_connection = True
            self.end_headers()
            self._event(": a comment", raw=True)
            for _ in range(body["max_tokens"]):
                self._event({"choices": [{"text": "word "}]})
                if failure == "cut":
                    self.close_connection = True
                    return
            if failure == "error":
                self._event({"error": {"message": "the engine has failed"}})
                return
            num_prompt = len(body["prompt"])
            self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"],
                                                  "prompt_tokens_details": {"cached_tokens": 1}}})  # fmt: skip
            self._event("data: [DONE]", raw=True)
        finally:
            if script.is_chunked and failure not in ("429", "cut"):
                self.wfile.write(b"0\r\n\r\n")
            with script.lock:
                script.in_flight -= 1

    def _event(self, value, *, raw: bool = False) -> None:
        data = ((value if raw else f"data: {json.dumps(value)}") + "\n\n").encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self.script.is_chunked else data)
        self.wfile.flush()

    def _json(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def workload(tmp_path: Path) -> str:
    entries = [
        {"prompt_token_ids": [40 + index, 41, 42], "max_tokens": 3 + index, "arrival_s": 0.01 * index}
        for index in range(NUM_REQUESTS)
    ]
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(entries))
    return str(path)


def measure(octavo, script: Script, workload: str, *args: str):
    return octavo("bench", "serve", "--base-url", script.url, "--workload", workload, "--json", *args)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_every_request_is_sent_and_counted(octavo, script: Script, workload: str, is_chunked: bool) -> None:
    script.is_chunked = is_chunked

    ran = measure(octavo, script, workload)

    document = json.loads(ran.out)
    assert ran.code == 0 and document["schema"] == "octavo.bench.serve/1"
    assert (document["num_requests"], document["num_whole"], document["errors"]) == (NUM_REQUESTS, NUM_REQUESTS, {})
    num_output = sum(3 + index for index in range(NUM_REQUESTS))
    assert (document["prompt_tokens"], document["output_tokens"]) == (3 * NUM_REQUESTS, num_output)
    assert document["cached_tokens"] == NUM_REQUESTS and document["num_short"] == 0
    assert (document["model"], document["prompts_as"]) == ("tiny", "token ids")
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "late_s"):
        assert set(document[name]) == {"mean", "p50", "p90", "p99"} and document[name]["p50"] >= 0
    assert document["ttft_s"]["p99"] <= document["e2e_s"]["p99"] <= document["wall_s"]
    sent = [body for body in script.bodies if body.get("stream")]
    assert sorted(body["prompt"][0] for body in sent) == [40 + index for index in range(NUM_REQUESTS)]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in sent)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_what_goes_wrong_is_counted_by_kind(octavo, script: Script, workload: str, is_chunked: bool) -> None:
    script.is_chunked = is_chunked
    script.failures = {0: "429", 1: "cut", 2: "error", 3: "cut"}

    document = json.loads(measure(octavo, script, workload, "--max-concurrency", "1").out)

    assert document["errors"] == {"cut short": 2, "error in the stream": 1, "http 429": 1}
    assert document["num_whole"] == NUM_REQUESTS - 4 and document["num_requests"] == NUM_REQUESTS


def test_no_answer_at_all_exits_with_1(octavo, script: Script, workload: str) -> None:
    script.failures = dict.fromkeys(range(NUM_REQUESTS), "429")

    ran = measure(octavo, script, workload)

    assert ran.code == 1 and json.loads(ran.out)["errors"] == {"http 429": NUM_REQUESTS}


def test_no_more_requests_are_in_flight_than_asked(octavo, script: Script, workload: str) -> None:
    document = json.loads(measure(octavo, script, workload, "--max-concurrency", "2", "--request-rate", "1000").out)

    assert document["max_in_flight"] <= 2 and script.most_in_flight <= 2
    assert document["num_whole"] == NUM_REQUESTS


def test_a_server_without_ignore_eos_is_asked_without_it(octavo, script: Script, workload: str) -> None:
    script.takes_ignore_eos = False

    document = json.loads(measure(octavo, script, workload).out)

    assert document["num_whole"] == NUM_REQUESTS and document["takes_ignore_eos"] is False


def test_a_server_without_token_ids_gets_text_if_a_tokenizer_is_named(
    octavo, script: Script, workload: str, tmp_path: Path
) -> None:
    from octavo.testing.tiny_models import TinyModel, write_hf_model

    script.takes_ids = False
    tokenizer = str(write_hf_model(TinyModel(), tmp_path / "tiny"))

    refused = measure(octavo, script, workload)
    document = json.loads(measure(octavo, script, workload, "--tokenizer", tokenizer).out)

    assert refused.code == 2 and "prompt must be text" in refused.err and "--tokenizer" in refused.err
    assert document["prompts_as"] == "text" and document["num_whole"] == NUM_REQUESTS
    assert all(isinstance(body["prompt"], str) and body["prompt"] for body in script.bodies if body.get("stream"))


def test_the_key_is_sent_and_a_missing_one_is_explained(octavo, script: Script, workload: str) -> None:
    script.key = "secret"

    refused = measure(octavo, script, workload)
    accepted = measure(octavo, script, workload, "--api-key", "secret")

    assert refused.code == 1 and "--api-key" in refused.err
    assert accepted.code == 0


def test_a_server_that_is_not_there_is_one_clear_error(octavo, workload: str) -> None:
    ran = octavo("bench", "serve", "--base-url", "http://127.0.0.1:9/v1", "--workload", workload)
    assert ran.code == 1 and "no server answers at 127.0.0.1:9" in ran.err and "octavo serve" in ran.err


def test_a_server_that_says_nothing_is_not_waited_for_beyond_the_timeout(octavo, workload: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/v1"
        ran = octavo("bench", "serve", "--base-url", url, "--workload", workload, "--timeout", "0.2")
    assert ran.code == 1 and "does not answer within 0.2 s" in ran.err


@pytest.mark.parametrize("option", ["--request-rate", "--timeout"])
def test_a_rate_that_is_no_number_is_refused(octavo, workload: str, option: str) -> None:
    ran = octavo("bench", "serve", "--base-url", "http://127.0.0.1:9/v1", "--workload", workload, option, "nan")
    assert ran.code == 2 and "nan is no finite number" in ran.err


def test_an_address_without_scheme_is_refused(octavo, workload: str) -> None:
    ran = octavo("bench", "serve", "--base-url", "localhost:8000", "--workload", workload)
    assert ran.code == 2 and "--base-url http://" in ran.err


def test_poisson_arrivals_have_the_asked_rate_and_repeat_with_their_seed() -> None:
    workload = [WorkloadRequest(prompt_token_ids=(1,), max_tokens=1)] * 4000

    times = arrivals(workload, request_rate=8.0, seed=1)

    assert times == arrivals(workload, request_rate=8.0, seed=1) != arrivals(workload, request_rate=8.0, seed=2)
    assert times == sorted(times) and times[0] == 0.0
    # The mean of 3,999 gaps has a standard error of 1.6 %; a fixed seed makes this a fact, not a chance.
    assert times[-1] / 3999 == pytest.approx(1 / 8.0, rel=0.05)
