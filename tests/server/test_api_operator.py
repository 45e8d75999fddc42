"""What operators see: the pool, the cache, and why a request went as it did."""

from __future__ import annotations

import httpx
import pytest

from octavo.server.settings import ServerSettings
from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import ServerProcess

PROMPT = list(range(100, 180))


def test_the_pool_is_shown_and_the_cache_can_be_forgotten(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "hello")
    with LocalServer(llm) as server, httpx.Client(base_url=server.url, timeout=30) as client:

        def cached() -> int:
            answer = client.post("/v1/completions", json={"prompt": PROMPT}).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert (cached(), cached()) == (0, 79)
        shown = client.get("/kv").json()
        assert shown["schema"] == "octavo.kv/1" and shown["totals"]["cached_blocks"] >= 5
        assert shown["model"] == client.get("/v1/models").json()["data"][0]["id"], "its name, not where it lies"
        reset = client.post("/kv/reset", json={})
        assert reset.json() == {"schema": "octavo.kv-reset/1", "is_reset": True}
        assert cached() == 0


def test_the_cache_is_not_forgotten_under_running_requests(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: [70] * 300)
    llm.runner.pause_s = 0.005
    body = {"prompt": "a", "max_tokens": 300, "stream": True}
    with LocalServer(llm) as server, httpx.stream("POST", f"{server.url}/v1/completions", json=body) as sent:
        lines = sent.iter_lines()  # kept: the answer is closed with it
        assert next(lines)
        refused = httpx.post(f"{server.url}/kv/reset", json={})

    assert refused.status_code == 409 and refused.json()["error"]["code"] == "kv-in-use"


@pytest.mark.parametrize("shows", [True, False])
def test_a_request_is_explained_by_either_of_its_ids(tiny_model: str, shows: bool):
    settings = ServerSettings(enable_operator=True, show_prompts=shows)
    local = LocalServer(scripted_llm(tiny_model, lambda _: "hello"), settings)
    with local as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/v1/completions", json={"prompt": PROMPT})
        near = [*PROMPT[:40], 7, *PROMPT[41:]]
        answer = client.post("/v1/completions", json={"prompt": near}, headers={"X-Request-Id": "mine"})
        by_ids = [client.get(f"/requests/{each}").json() for each in (answer.json()["id"], "mine")]
        unknown = client.get("/requests/never")

    assert unknown.status_code == 404
    assert by_ids[0]["request_id"] == by_ids[1]["request_id"] == answer.json()["id"]
    found = by_ids[0]
    assert found["schema"] == "octavo.explain/1" and found["finish_reason"] == "stop"
    assert found["hits"]["num_block_tokens"] + found["hits"]["num_copied_tokens"] == 40
    assert found["near_miss"]["position"] == 40
    assert ("text" in found["near_miss"]) == ("cached_text" in found["near_miss"]) == shows


def test_the_openapi_document_names_every_route(server: ServerProcess):
    paths = set(httpx.get(f"{server.url}/openapi.json").json()["paths"])

    assert paths >= {
        "/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
        "/health", "/ready", "/version", "/kv", "/kv/reset", "/requests/{request_id}", "/metrics",
    }  # fmt: skip
