"""A server that is killed and comes back, and two that are replaced in turn behind nginx while requests come in."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from octavo.llm.http_stream import parse_url
from octavo.llm.offline import LLM
from octavo.server.settings import ServerSettings
from octavo.testing.known_load import KnownAnswer, KnownRequest, check_load, compute_alone, random_requests
from octavo.testing.load_client import Heard, hear, send_all
from octavo.testing.nginx import Nginx, find_nginx
from octavo.testing.scripted_llm import LocalServer, ScriptedLLM, scripted_llm
from octavo.testing.server_process import SMALL, ServerProcess, free_port
from octavo.testing.server_rest import read_metrics, wait_for_rest

SITE = Path(__file__).parents[2] / "docs" / "nginx.conf"
PAUSE_S = 0.1
"""Between two requests of a steady load."""
PATIENCE_S = 2.0
ENOUGH = 400
needs_nginx = pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def requests() -> list[KnownRequest]:
    return random_requests(40, seed=8, vocab=range(60, 400), max_prompt_tokens=30, max_output_tokens=12)


@pytest.fixture(scope="module")
def alone(tiny_model: str, requests: list[KnownRequest]) -> list[KnownAnswer]:
    llm = LLM(tiny_model, num_blocks=32, max_model_len=256, threads=1, enable_prefix_caching=False)
    return compute_alone(llm, requests)


def digest(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def wait_for(question: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---- killed ----


def test_a_server_killed_amid_streams_comes_back_on_its_port_and_nothing_it_wrote_is_broken(
    tiny_model: str, tmp_path: Path, requests: list[KnownRequest], alone: list[KnownAnswer]
):
    port = free_port()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    options = (tiny_model, *SMALL, "--enable-operator", "--log-format", "json")
    files = digest(Path(tiny_model))
    endless = KnownRequest(prompt_token_ids=(70,), max_tokens=900)
    with ServerProcess(*options, "--runner", "reference", environ=environ, port=port) as server:
        cut: list[Heard] = []
        clients = threading.Thread(
            target=lambda: cut.extend(asyncio.run(send_all(server.url, [endless.ask() for _ in range(8)])))
        )
        clients.start()
        server.wait_for(lambda: httpx.get(f"{server.url}/kv").json()["totals"]["num_running"] == 8)
        server.signal(signal.SIGKILL)
        server.wait()
        clients.join(30)
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]

    assert [one.fate for one in cut] == ["lost"] * 8, "the kill came too late"
    assert all("message" in line or "event" in line for line in lines)
    assert digest(Path(tiny_model)) == files

    with ServerProcess(*options, environ=environ, port=port) as server:
        assert server.url.endswith(f":{port}")
        heard = asyncio.run(send_all(server.url, [request.ask() for request in requests]))
        asyncio.run(wait_for_rest(server.url))

    assert check_load(heard, alone) == {"answered": len(requests)}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "a server keeps nothing on disk"


# ---- behind nginx ----


class SteadyLoad:
    """Sends known requests, one after a short pause, until it is told to stop; leaves when all have ended."""

    def __init__(self, url: str, requests: list[KnownRequest]) -> None:
        self.heard: list[Heard] = []
        self.num_sent = 0
        self._url = url
        self._requests = requests
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> list[Heard]:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "requests are still out"
        return self.heard

    async def _run(self) -> None:
        tasks = []
        while not self._is_over.is_set():
            ask = self._requests[self.num_sent % len(self._requests)].ask()
            tasks.append(asyncio.create_task(hear(parse_url(self._url), ask, start_s=time.perf_counter())))
            self.num_sent += 1
            await asyncio.sleep(PAUSE_S)
        self.heard = list(await asyncio.gather(*tasks))


@needs_nginx
def test_two_servers_replaced_in_turn_under_load_lose_no_request(
    tiny_model: str, tmp_path: Path, requests: list[KnownRequest], alone: list[KnownAnswer]
):
    """Each is told to drain, ends what it has, goes, comes back, and says that it is ready; then the other."""
    ports = (free_port(), free_port())
    with ExitStack() as stack:
        running = [stack.enter_context(ServerProcess(tiny_model, *SMALL, port=port)) for port in ports]
        proxy = stack.enter_context(Nginx(SITE, tmp_path, ports=ports))
        load = SteadyLoad(proxy.url, requests)
        try:
            for old, port in zip(running, ports, strict=True):
                num_before = load.num_sent
                wait_for(lambda sent=num_before: load.num_sent > sent + 3)
                old.signal(signal.SIGTERM)
                assert old.wait() == 0
                new = stack.enter_context(ServerProcess(tiny_model, *SMALL, port=port, waits=False))
                new.wait_for(lambda url=new.url: httpx.get(f"{url}/ready").status_code == 200)
        finally:
            heard = load.stop()
        num_passed_on = proxy.num_passed_on

    known = [alone[index % len(alone)] for index in range(len(heard))]
    assert check_load(heard, known) == {"answered": len(heard)}
    assert num_passed_on > 0, "no request came to a server that would not have it"


@pytest.fixture
def llm(tiny_model: str) -> ScriptedLLM:
    return scripted_llm(tiny_model, lambda _: [70] * ENOUGH, max_num_seqs=1)


@pytest.fixture
def long_request() -> KnownRequest:
    return KnownRequest(prompt_token_ids=(70,), max_tokens=ENOUGH)


class Behind:
    """A scripted server behind an nginx that gives up after two seconds of silence."""

    def __init__(self, llm: ScriptedLLM, folder: Path, *, keep_alive: float) -> None:
        self._server = LocalServer(llm, ServerSettings(enable_operator=True, keep_alive=keep_alive))
        self._folder = folder

    def __enter__(self) -> Nginx:
        self._server.__enter__()
        port = int(self._server.url.rpartition(":")[2])
        self._proxy = Nginx(SITE, self._folder, ports=(port,), read_timeout_s=PATIENCE_S)
        return self._proxy.__enter__()

    def __exit__(self, *error: object) -> None:
        self._proxy.__exit__(None, None, None)
        self._server.__exit__(None, None, None)


@pytest.mark.parametrize(("keep_alive", "fate"), [(0.2, "answered"), (0.0, "lost")], ids=["comments", "silence"])
@needs_nginx
def test_a_wait_longer_than_nginx_has_patience_survives_by_comments_and_by_nothing_else(
    llm: ScriptedLLM, tmp_path: Path, keep_alive: float, fate: str, long_request: KnownRequest
):
    llm.runner.gate.clear()
    with Behind(llm, tmp_path, keep_alive=keep_alive) as proxy:
        heard: list[Heard] = []
        client = threading.Thread(
            target=lambda: heard.extend(asyncio.run(send_all(proxy.url, [long_request.ask(with_scores=False)])))
        )
        client.start()
        if fate == "answered":
            time.sleep(2 * PATIENCE_S)  # what is tested: longer than nginx would have waited in silence
            assert client.is_alive()
        else:
            wait_for(lambda: not client.is_alive())
        llm.runner.gate.set()
        client.join(30)

    assert heard[0].fate == fate, heard[0].why
    if fate == "answered":
        assert heard[0].num_comments >= 3
        assert heard[0].num_tokens == ENOUGH


@needs_nginx
def test_deltas_pass_nginx_as_they_come(llm: ScriptedLLM, tmp_path: Path, long_request: KnownRequest):
    llm.runner.pause_s = 0.05
    with Behind(llm, tmp_path, keep_alive=15.0) as proxy:
        body = long_request.ask(with_scores=False).body
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            was_running = llm.health.num_running
            llm.runner.pause_s = 0.0
            *_, last = [line for line in lines if line]

    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
    assert was_running == 1, "the first piece came with the last"
    assert last == "data: [DONE]"


@needs_nginx
def test_a_client_that_leaves_nginx_ends_its_request(llm: ScriptedLLM, tmp_path: Path, long_request: KnownRequest):
    llm.runner.pause_s = 0.05
    with Behind(llm, tmp_path, keep_alive=15.0) as proxy:
        body = long_request.ask(with_scores=False).body
        with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=30) as answer:
            next(answer.iter_lines())
        wait_for(lambda: llm.health.num_running == 0)
        metrics = asyncio.run(read_metrics(proxy.url))
        asyncio.run(wait_for_rest(proxy.url))

    assert metrics['octavo_requests_finished_total{reason="abort"}'] == 1
    assert metrics["octavo_output_tokens_total"] < ENOUGH
