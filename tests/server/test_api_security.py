"""Who may come in, and with how much."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from octavo.errors import InvalidParameterError, MachineError
from octavo.server import routes_page, security
from octavo.server.security import Keys, read_keys
from octavo.server.settings import ServerSettings
from octavo.testing.scripted_llm import LocalServer, scripted_llm

BODY = {"prompt": "hello, a prompt of more than one block of sixteen tokens", "max_tokens": 2}


def serving(folder: str, **settings: object) -> LocalServer:
    return LocalServer(scripted_llm(folder, lambda _: "ok"), ServerSettings(**settings))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_with_a_key_everything_but_health_asks_for_it(tiny_model: str):
    with serving(tiny_model, api_key=("first", "second")) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/ready", "/version", "/openapi.json", "/metrics", "/nothing", "/v1//models"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers=bearer("third")).status_code == 401, path
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert "first" not in refused.text
        for key in ("first", "second"):
            assert client.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
        for header in ("first", "Basic first", "Bearer", "Bearer first second", "Bearer First", "bearer\tfirst"):
            assert client.get("/v1/models", headers={"Authorization": header}).status_code == 401, header


def test_a_tenant_cannot_tell_what_another_has_asked(tiny_model: str):
    """Hits end at the key, whatever salt a caller sends along."""

    def cached(client: httpx.Client, key: str, **fields: object) -> int:
        answer = client.post("/v1/completions", json={**BODY, **fields}, headers=bearer(key)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(tiny_model, api_key=("a-key", "b-key")) as server, httpx.Client(base_url=server.url) as client:
        assert cached(client, "a-key") == 0
        assert cached(client, "a-key") > 0
        assert cached(client, "b-key") == 0
        assert cached(client, "a-key", cache_salt="s") == 0
        assert cached(client, "a-key", cache_salt="s") > 0
        assert cached(client, "b-key", cache_salt="s") == 0
    shared = serving(tiny_model, api_key=("a-key", "b-key"), share_cache=True)
    with shared as server, httpx.Client(base_url=server.url) as client:
        assert cached(client, "a-key") == 0
        assert cached(client, "b-key") > 0


def test_all_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch):
    from starlette.datastructures import Headers

    compared = []
    real = __import__("hmac").compare_digest
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))

    Keys(["one", "two", "three"]).find(Headers({"authorization": "Bearer one"}))

    assert [key for key, _ in compared] == [b"one", b"two", b"three"], "none is skipped once another fits"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("192.168.3.4:8000", 200),
        (socket.gethostname(), 200),
        ("LOCALHOST.", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_server_are_answered(tiny_model_server: str, host: str, status: int):
    answer = httpx.get(f"{tiny_model_server}/v1/models", headers={"Host": host})
    assert answer.status_code == status, answer.text


@pytest.fixture(scope="module")
def tiny_model_server(tiny_model: str):
    with serving(tiny_model) as server:
        yield server.url


def test_a_name_can_be_allowed(tiny_model: str):
    with serving(tiny_model, allowed_host=("llm.example",)) as server:
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "llm.example:443"}).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": "other.example"}).status_code == 403


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
@pytest.mark.parametrize("path", ["/v1/completions", "/kv/reset", "/tokenize"])
def test_a_form_of_another_page_cannot_post(tiny_model: str, kind: str | None, path: str):
    with serving(tiny_model, enable_operator=True) as server:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = httpx.post(server.url + path, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415


def test_no_other_page_may_read_unless_it_is_named(tiny_model: str):
    page = {"Origin": "https://page.example"}
    with serving(tiny_model) as server:
        assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=page).headers
        asked = {**page, "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{server.url}/v1/completions", headers=asked).status_code == 405
    with serving(tiny_model, cors_origin=("https://page.example",), api_key=("k",)) as server:
        answer = httpx.options(
            f"{server.url}/v1/completions", headers={**page, "Access-Control-Request-Method": "POST"}
        )
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        # OpenAI's client for browsers tells the server about itself, and a browser asks for each header.
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-stainless-os"}
        assert httpx.options(f"{server.url}/v1/completions", headers={**page, **wanted}).status_code == 200
        other = {"Origin": "https://other.example", **wanted}
        answer = httpx.options(f"{server.url}/v1/completions", headers=other)
        assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
        refused = httpx.get(f"{server.url}/v1/models", headers=page)
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_a_body_beyond_the_limit_is_refused_told_or_not(tiny_model: str):
    def parts():
        yield b'{"prompt": "'
        for _ in range(64):
            yield b"a" * 1024
        yield b'"}'

    with serving(tiny_model, max_body_bytes=16 * 1024, max_prompt_chars=1000) as server:
        headers = {"Content-Type": "application/json"}
        told = httpx.post(f"{server.url}/v1/completions", content=b"a" * 20_000, headers=headers)
        untold = httpx.post(f"{server.url}/v1/completions", content=parts(), headers=headers)
        long = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 1001})
        long_chat = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 1001}]}
        )

    assert (told.status_code, untold.status_code) == (413, 413)
    assert (long.status_code, long_chat.status_code) == (400, 400)
    assert long_chat.json()["error"]["param"] == "messages"


def test_a_body_that_takes_too_long_is_refused(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    """Whether it dribbles or stops, and whether it says its length or comes in chunks without end."""
    monkeypatch.setattr(security, "BODY_TIMEOUT_S", 0.5)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(tiny_model) as server:
        for framing, piece in (
            (b"Content-Length: 9999\r\n\r\n", b"a"),
            (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        ):
            for dribbles in (False, True):
                with contextlib.closing(connect(server)) as slow:
                    slow.sendall(head + framing + piece)
                    slow.settimeout(0.05)
                    answer = b""
                    while True:
                        try:
                            part = slow.recv(10_000)
                            answer += part
                            if not part:
                                break
                        except TimeoutError:
                            with contextlib.suppress(ConnectionError):
                                slow.sendall(piece * dribbles)
                    assert answer.startswith(b"HTTP/1.1 408") and b"body-too-slow" in answer


def test_bodies_of_all_requests_together_are_bounded(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    """A thousand of them, each sent slowly and never to its end, would fill the memory."""
    monkeypatch.setattr(security, "MAX_OPEN_BODIES", 2)
    size = 40_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % size
    with serving(tiny_model, max_body_bytes=size) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            for _ in range(2):
                stack.enter_context(contextlib.closing(connect(server))).sendall(head + b" " * (size - 1))
            fits = {"prompt": "a" * 100, "max_tokens": 1}
            deadline_s = time.monotonic() + 20
            while httpx.post(f"{server.url}/v1/completions", json=fits).status_code == 200:
                assert time.monotonic() < deadline_s, "all bodies are there, and another is taken"
            refused = httpx.post(f"{server.url}/v1/completions", json=fits)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too-many-bytes"
            assert httpx.get(f"{server.url}/v1/models").status_code == 200, "it has no body"
            stack.close()
            deadline_s = time.monotonic() + 20
            while httpx.post(f"{server.url}/v1/completions", json=fits).status_code != 200:
                assert time.monotonic() < deadline_s, "their room is not given back"


def test_plans_wait_in_a_short_queue(tiny_model: str, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    real = routes_page.PlanForm.answer
    monkeypatch.setattr(routes_page.PlanForm, "answer", lambda self, words: gate.wait(20) and real(self, words))
    monkeypatch.setattr(routes_page, "MAX_WAITING_PLANS", 2)
    with serving(tiny_model) as server, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(httpx.get, f"{server.url}/plan", timeout=30) for _ in range(3)]
        [first] = concurrent.futures.wait(asked, timeout=20, return_when=concurrent.futures.FIRST_COMPLETED).done
        gate.set()
        assert first.result().status_code == 429
        assert sorted(each.result().status_code for each in asked) == [200, 200, 429]
        assert httpx.get(f"{server.url}/plan", timeout=30).status_code == 200


def connect(server: LocalServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def test_headers_without_end_are_refused(tiny_model_server: str):
    answer = httpx.get(f"{tiny_model_server}/v1/models", headers={"X-Long": "a" * 100_000})
    assert answer.status_code == 431
    assert answer.json()["error"]["code"] == "headers-too-large"


def test_the_operators_endpoints_are_closed_unless_opened(tiny_model: str):
    json_headers = {"Content-Type": "application/json"}
    with serving(tiny_model) as server:
        assert httpx.get(f"{server.url}/kv").status_code == 403
        assert httpx.post(f"{server.url}/kv/reset", headers=json_headers).status_code == 403
        assert httpx.get(f"{server.url}/requests/x").status_code == 403
    with serving(tiny_model, operator_key="op", api_key=("user",)) as server:
        for headers, status in (({}, 401), (bearer("user"), 401), (bearer("op"), 200)):
            answer = httpx.post(f"{server.url}/kv/reset", headers={**json_headers, **headers})
            assert answer.status_code == status
        assert httpx.get(f"{server.url}/v1/models", headers=bearer("op")).status_code == 200
    with serving(tiny_model, enable_operator=True, api_key=("user",)) as server:
        for headers, status in (({}, 401), (bearer("user"), 200)):
            answer = httpx.post(f"{server.url}/kv/reset", headers={**json_headers, **headers})
            assert answer.status_code == status


def test_keys_come_from_a_file_too(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n second \n")

    assert read_keys(ServerSettings(api_key=("zero",), api_key_file=str(path))) == ("zero", "first", "second")

    path.write_text("# none\n")
    with pytest.raises(InvalidParameterError, match="no key"):
        read_keys(ServerSettings(api_key_file=str(path)))
    with pytest.raises(MachineError):
        read_keys(ServerSettings(api_key_file=str(tmp_path / "missing")))


@pytest.mark.parametrize("key", ["with space", "ümlaut", "tab\t"])
def test_a_key_that_no_header_can_hold_is_refused_at_start(key: str):
    with pytest.raises(InvalidParameterError):
        ServerSettings(api_key=(f"x{key}x",))


def test_one_way_to_open_the_operators_endpoints_is_enough():
    with pytest.raises(InvalidParameterError, match="given together"):
        ServerSettings(enable_operator=True, operator_key="k")


@pytest.mark.parametrize("host", ["llm.example.org:8000", "https://llm.example.org", "llm.example.org/v1"])
def test_a_name_that_no_host_header_has_is_refused_rather_than_never_met(host: str):
    with pytest.raises(InvalidParameterError, match="leave out scheme, port and path"):
        ServerSettings(allowed_host=(host,))


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://page.example/app", "://x"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str):
    with pytest.raises(InvalidParameterError, match="is no origin"):
        ServerSettings(cors_origin=(origin,))
    ServerSettings(cors_origin=("https://page.example:8443", "tauri://localhost", "null", "*"))


def test_a_file_of_keys_may_come_from_windows(tmp_path):
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbffirst\r\n# old\r\nsecond\r\n")
    assert read_keys(ServerSettings(api_key_file=str(tmp_path / "keys"))) == ("first", "second")
