"""Large bodies: read aside, the same as small ones, and only as many values as anybody needs."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest

from octavo.server import json_body, routes_openai
from octavo.server.errors import ApiError
from octavo.server.json_body import (
    LARGE_BODY_BYTES,
    MANY_VALUES,
    MAX_CONTAINERS,
    dump_json,
    dump_json_yielding,
    read_json,
)
from octavo.server.protocol_chat import ChatRequest
from octavo.server.service import Service
from octavo.testing.scripted_llm import LocalServer, scripted_llm

PADDING = {"metadata": {"a": "x" * LARGE_BODY_BYTES}}
PADDING_OF_VALUES = {"metadata": {"a": list(range(MANY_VALUES))}}


@pytest.fixture(scope="module")
def client(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "words")
    with LocalServer(llm) as server, httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


def documents(rng: Random, count: int) -> list[str]:
    """Return JSON texts with long runs of numbers in them, many of them broken somewhere."""

    def value(depth: int) -> object:
        kind = rng.randrange(9) if depth else 8
        if kind == 0:
            return {str(rng.randrange(99)): value(depth - 1) for _ in range(rng.randrange(4))}
        if kind < 5:
            odd = (0, -7, 10**17, 10**18, 1.5, "a", None, True, 10**30, -0.0)
            numbers = [
                rng.choice(odd) if rng.random() < 0.01 else rng.randrange(-99, 10**6) for _ in range(rng.randrange(400))
            ]
            return numbers + [value(depth - 1)] * rng.randrange(2)
        return rng.choice([1, 2.5, "x,[{", None, False, -3])

    texts = []
    for _ in range(count):
        text = json.dumps(value(4), indent=rng.choice([None, 1]), separators=rng.choice([(",", ":"), None]))
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice([*',][0- \n"}.e', "\u00a0"]) + text[place + rng.randrange(2) :]
        texts.append(text)
    return texts


def test_what_is_read_in_parts_is_what_is_read_at_once(monkeypatch: pytest.MonkeyPatch):
    """Values, and what is said of texts that are no JSON, with its place."""
    texts = documents(Random(7), 500)
    whole = [read(text) for text in texts]
    monkeypatch.setattr(json_body, "MANY_VALUES", -1)
    in_parts = [read(text) for text in texts]

    assert in_parts == whole
    num_refused = sum(read.startswith("the body is not JSON") for read in whole)
    assert 100 < num_refused < 400, "no test of one or the other"


def read(text: str) -> str:
    try:
        return repr(read_json(text.encode()))
    except ApiError as error:
        return error.message


@pytest.mark.parametrize(
    "text", ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "[NaN" + ",1" * 30_000 + "]"]
)
def test_limits_hold_for_bodies_that_are_read_in_parts(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_body, "MANY_VALUES", -1)
    with pytest.raises(ApiError):
        read_json(text.encode())


@pytest.mark.parametrize("each", ["[]", "{}", '[{"a": []}]'])
def test_a_body_of_brackets_is_refused(each: str):
    with pytest.raises(ApiError) as caught:
        read_json(f"[{','.join([each] * MAX_CONTAINERS)}]".encode())
    assert caught.value.code == "too-many-values" and caught.value.status_code == 400


def test_what_is_written_in_parts_is_what_is_written_at_once():
    value = {"a": [1, 2.5, None, 'ü\u2028"\\', {"b": []}, ()], "c": -9999.0, "d": {"1": 1e-300}}
    assert dump_json_yielding(value) == dump_json(value)
    with pytest.raises(ValueError, match="Out of range"):
        dump_json_yielding([float("inf")])


@pytest.mark.parametrize("padding", [PADDING, PADDING_OF_VALUES], ids=["a long text", "many values"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": "many"}),
        ("/v1/completions", {"prompt": "a", "temprature": 1}),
        ("/v1/completions", {"max_tokens": 1}),
        ("/v1/completions", {"prompt": [1, "a"]}),
        ("/v1/completions", {"prompt": "a", "best_of": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
def test_a_large_body_is_answered_as_a_small_one(client: httpx.Client, path: str, fields: dict, padding: dict):
    small = client.post(path, json=fields)
    large = client.post(path, json={**fields, **padding})

    assert large.status_code == small.status_code
    if small.status_code != 200:
        assert large.json() == small.json()
    else:
        assert large.json()["choices"] == small.json()["choices"]


def test_a_large_body_that_is_no_object_is_refused(client: httpx.Client):
    for body in ([1] * 50_000, "a" * 100_000):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = client.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid-parameter"


def test_large_bodies_are_read_by_a_thread_of_their_own(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    """The event loop and the engine have other things to do; and so have the threads that read everybody's texts."""
    names = []
    real = json_body.read_json

    def noting(data: bytes) -> object:
        names.append(threading.current_thread().name)
        return real(data)

    monkeypatch.setattr(json_body, "read_json", noting)
    large = [client.post("/detokenize", json={"tokens": [9] * 40_000}) for _ in range(3)]
    [name] = set(names)
    assert name.startswith("octavo-text") and {answer.status_code for answer in large} == {200}
    names.clear()
    assert client.post("/detokenize", json={"tokens": [9]}).status_code == 200
    assert not names[0].startswith("octavo-text"), "a thread for each small body would cost more than reading it"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"enum": [{"a": 9}] * 20_000}}, "guided_json"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": f"f{i}", "parameters": {"enum": ["x" * 900]}}}
                    for i in range(128)
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=["schema", "tools"],
)
def test_a_large_schema_is_worked_out_aside(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, fields: dict, param: str
):
    names = []
    real = ChatRequest.sampling_params

    def noting(self: ChatRequest, *args: object) -> object:
        names.append(threading.current_thread().name)
        return real(self, *args)

    monkeypatch.setattr(ChatRequest, "sampling_params", noting)
    calls = routes_openai.required_calls
    monkeypatch.setattr(
        routes_openai, "required_calls", lambda *a: names.append(threading.current_thread().name) or calls(*a)
    )
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **fields})

    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text[:500]
    assert names and all(name.startswith("octavo-text") for name in names)


def test_small_texts_do_not_wait_for_large_ones(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    """However many clients send texts that take seconds to read."""
    gate = threading.Event()
    real = Service.tokenize

    def slow(self: Service, prompts: list, **how: bool) -> object:
        assert len(prompts[0]) < 1000 or gate.wait(30)
        return real(self, prompts, **how)

    monkeypatch.setattr(Service, "tokenize", slow)
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(client.post, "/v1/completions", json={"prompt": "a" * 100_000}) for _ in range(4)]
        small = [client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) for _ in range(3)]
        assert [answer.status_code for answer in small] == [200] * 3
        assert not any(each.done() for each in large)
        gate.set()
        assert {each.result().status_code for each in large} == {400}


def test_as_many_ids_as_are_taken_are_spelled(client: httpx.Client):
    assert len(client.post("/detokenize", json={"tokens": [9] * 2**20}).json()["prompt"]) >= 2**20
    refused = client.post("/detokenize", json={"tokens": [9] * (2**20 + 1)})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
