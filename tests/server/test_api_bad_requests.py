"""Bad requests: the right status, a body that says what is wrong, and a server that answers the next one."""

from __future__ import annotations

import gzip
import json
import time

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from octavo.server.protocol_chat import ChatRequest
from octavo.server.protocol_completions import CompletionRequest
from octavo.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from octavo.testing.server_process import ServerProcess

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def user(content: object) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


# name: (path, fields over a good body, status, what `param` is)
BAD = {
    "no answers": (CHAT, {"n": 0}, 400, "n"),
    "too many answers": (CHAT, {"n": 257}, 400, "n"),
    "text for a number": (CHAT, {"n": "1"}, 400, "n"),
    "a fraction of an answer": (CHAT, {"n": 1.5}, 400, "n"),
    "a flag for a number": (CHAT, {"temperature": True}, 400, "temperature"),
    "negative length": (TEXT, {"max_tokens": -1}, 400, "max_tokens"),
    "nothing to return": (TEXT, {"max_tokens": 0}, 400, "max_tokens"),
    "no length": (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
    "two lengths": (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    "too long": (CHAT, {"max_tokens": 100_000}, 400, "max_tokens"),
    "too long a prompt": (TEXT, {"prompt": [5] * 2000}, 400, "prompt"),
    "too many answers in all": (TEXT, {"prompt": ["a"] * 100, "n": 100, "max_tokens": 1}, 400, "prompt"),
    "too long a chat": (CHAT, user("word " * 2000), 400, "messages"),
    "no messages": (CHAT, {"messages": []}, 400, "messages"),
    "messages missing": (CHAT, {"messages": None}, 400, "messages"),
    "one message": (CHAT, {"messages": MESSAGES[0]}, 400, "messages"),
    "no role": (CHAT, {"messages": [{"content": "a"}]}, 400, "messages[0].role"),
    "unknown role": (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages[0].role"),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    "empty turn": (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, 400, "messages[1].content"),
    "content of a number": (CHAT, user(5), 400, "messages[0].content"),
    "an image": (CHAT, user([{"type": "image_url", "image_url": {"url": "x"}}]), 400, "messages[0].content"),
    "a part of no kind": (CHAT, user([{"type": [], "text": "a"}]), 400, "messages[0].content"),
    "an unknown part": (CHAT, user([{"type": "smell"}]), 400, "messages[0].content"),
    "a part without text": (CHAT, user([{"type": "text"}]), 400, "messages[0].content"),
    "an unknown field of a message": (CHAT, {"messages": [{**MESSAGES[0], "mood": 1}]}, 400, "messages[0].mood"),
    "unknown model": (CHAT, {"model": "gpt-4"}, 404, "model"),
    "model of a number": (CHAT, {"model": 4}, 400, "model"),
    "unknown field": (CHAT, {"temprature": 1}, 400, "temprature"),
    "bias of a word": (CHAT, {"logit_bias": {"AI": 1}}, 400, "logit_bias"),
    "bias of a negative id": (CHAT, {"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    "bias beyond the vocabulary": (CHAT, {"logit_bias": {"517": 1}}, 400, "logit_bias"),
    "too strong a bias": (CHAT, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    "bias of a text": (CHAT, {"logit_bias": {"5": "1"}}, 400, "logit_bias"),
    "best of": (TEXT, {"best_of": 2}, 400, "best_of"),
    "suffix": (TEXT, {"suffix": "end"}, 400, "suffix"),
    "functions": (CHAT, {"functions": [{}]}, 400, "functions"),
    "audio": (CHAT, {"modalities": ["audio"]}, 400, "modalities[0]"),
    "no prompt": (TEXT, {"prompt": None}, 400, "prompt"),
    "empty list": (TEXT, {"prompt": []}, 400, "prompt"),
    "empty text": (TEXT, {"prompt": ""}, 400, "prompt"),
    "mixed prompt": (TEXT, {"prompt": [5, "a"]}, 400, "prompt"),
    "an id that is none": (TEXT, {"prompt": [512]}, 400, "prompt"),
    "a negative id": (TEXT, {"prompt": [-1]}, 400, "prompt"),
    "too many prompts": (TEXT, {"prompt": ["a"] * 257}, 400, "prompt"),
    "temperature below": (CHAT, {"temperature": -0.1}, 400, "temperature"),
    "top_p above": (CHAT, {"top_p": 1.1}, 400, "top_p"),
    "top_k": (CHAT, {"top_k": -2}, 400, "top_k"),
    "seed beyond 64 bits": (CHAT, {"seed": 2**63}, 400, "seed"),
    "empty stop": (CHAT, {"stop": ""}, 400, "stop"),
    "stop of numbers": (CHAT, {"stop": [1]}, 400, "stop"),
    "too many stops": (CHAT, {"stop": ["a"] * 65}, 400, "stop"),
    "too long a stop": (CHAT, {"stop": "a" * 1025}, 400, "stop"),
    "a stop that never comes": (CHAT, {"stop": ["a", "\ud800"]}, 400, "stop"),
    "a stop id that is none": (CHAT, {"stop_token_ids": [512]}, 400, "stop_token_ids"),
    "logprobs of a number": (CHAT, {"logprobs": 3}, 400, "logprobs"),
    "alternatives alone": (CHAT, {"top_logprobs": 3}, 400, "top_logprobs"),
    "too many alternatives": (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "stream options alone": (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "min above max": (CHAT, {"min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
    "empty salt": (CHAT, {"cache_salt": ""}, 400, "cache_salt"),
    "messages once more": (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    "tools as a variable": (CHAT, {"chat_template_kwargs": {"a": 1, "tools": []}}, 400, "chat_template_kwargs"),
    "another bos": (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, 400, "chat_template_kwargs"),
    "no prompt for the answer": (CHAT, {"chat_template_kwargs": {"add_generation_prompt": False}}, 400,
                                 "chat_template_kwargs"),
    "a template": (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
    "variables that are none": (CHAT, {"chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
    "half a surrogate pair": (CHAT, user("\ud800"), 400, "messages"),
    "half a pair in a prompt": (TEXT, {"prompt": "\udfff"}, 400, "prompt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


def check_error(answer: httpx.Response, status: int, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = json.loads(answer.text, parse_constant=pytest.fail)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"] and error["code"]
    if param is not None:
        assert error["param"] == param


def check_alive(client: httpx.Client) -> None:
    canary = client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2})
    assert canary.status_code == 200, canary.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_before_anything_is_sent(client: httpx.Client, name: str, stream: bool):
    path, fields, status, param = BAD[name]
    good = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    body = {
        **good,
        "max_tokens": 4,
        **fields,
        **({"stream": True} if stream and "stream_options" not in fields else {}),
    }
    start_s = time.monotonic()

    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})

    check_error(answer, status, param)
    assert time.monotonic() - start_s < 10
    check_alive(client)


def test_a_known_name_is_suggested_for_a_misspelt_one(client: httpx.Client):
    answer = client.post(CHAT, json={"messages": MESSAGES, "temprature": 1})
    assert "did you mean 'temperature'?" in answer.json()["error"]["message"]


def test_an_unknown_model_is_told_the_names_there_are(client: httpx.Client):
    answer = client.post(CHAT, json={"messages": MESSAGES, "model": "gpt-4"})
    assert "only tiny" in answer.json()["error"]["message"]


def test_null_means_absent_for_every_optional_field(client: httpx.Client):
    from octavo.server.protocol_chat import ChatRequest
    from octavo.server.protocol_completions import CompletionRequest

    for path, model, good in (
        (CHAT, ChatRequest, {"messages": MESSAGES}),
        (TEXT, CompletionRequest, {"prompt": "hi"}),
    ):
        nulls = {name: None for name in model.model_fields if name not in good}
        answer = client.post(path, json={**good, **nulls, "max_tokens": 2})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_clients_send_and_that_change_nothing_are_taken(client: httpx.Client, stream: bool):
    ignored = {
        "user": "me",
        "safety_identifier": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "response_format": {"type": "text"},
    }
    answer = client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2, "stream": stream, **ignored})
    assert answer.status_code == 200, answer.text


RAW = {
    "a stray byte": b'{"prompt": "\xff"}',
    "a cut character": b'{"prompt": "\xe2\x82"}',
    "an overlong form": b'{"prompt": "\xc0\xaf"}',
    "a surrogate in bytes": b'{"prompt": "\xed\xa0\x80"}',
    "latin-1": '{"prompt": "grüße"}'.encode("latin-1"),
    "UTF-16": '{"prompt": "hi"}'.encode("utf-16"),
    "empty": b"",
    "no JSON": b"prompt=hi",
    "a cut document": b'{"prompt": "hi"',
    "two documents": b'{"prompt": "hi"}{}',
    "deep arrays": b"[" * 10_000 + b"]" * 10_000,
    "deep prompt": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "NaN": b'{"prompt": "hi", "temperature": NaN}',
    "NaN where nobody looks": b'{"prompt": "hi", "metadata": {"a": NaN}}',
    "Infinity": b'{"prompt": "hi", "temperature": Infinity}',
    "a number beyond doubles": b'{"prompt": "hi", "temperature": 1e400}',
    "a number of many digits": b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    "a field twice": b'{"prompt": "hi", "max_tokens": 1, "prompt": "ho"}',
    "a field twice in a field": b'{"prompt": "hi", "stream": true, "stream_options": {"a": 1, "a": 1}}',
    "many fields and one twice": b'{"prompt": "hi", "metadata": {'
    + b",".join(b'"%d": 1' % (i % 49_999) for i in range(50_000))
    + b"}}",
    "a list": b"[]",
    "a word": b'"hi"',
    "null": b"null",
}


@pytest.mark.parametrize("name", RAW)
def test_a_body_that_is_no_request_is_a_400_with_a_body(client: httpx.Client, name: str):
    answer = client.post(TEXT, content=RAW[name], headers={"Content-Type": "application/json"})

    check_error(answer, 400)
    check_alive(client)


def test_a_missing_body_is_called_so(client: httpx.Client):
    answer = client.post(TEXT, headers={"Content-Type": "application/json"})
    check_error(answer, 400)
    assert answer.json()["error"]["message"] == "there is no body"


def test_a_compressed_body_is_called_so(client: httpx.Client):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    check_error(client.post(TEXT, content=gzip.compress(b'{"prompt": "a"}'), headers=headers), 415, "Content-Encoding")
    plain = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert client.post(TEXT, content=b'{"prompt": "a", "max_tokens": 1}', headers=plain).status_code == 200


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/health", "/ready", "/version", "/v1/models", "/metrics"])
def test_head_tells_what_get_would(client: httpx.Client, path: str):
    """Probes of load balancers and of people ask like that."""
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_of_what_does_not_end_or_is_no_page_is_refused(client: httpx.Client):
    assert [client.head(path).status_code for path in ("/live", TEXT, "/nothing")] == [405, 405, 404]


def nested(depth: int) -> dict:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


HALF = "\ud800"
HOSTILE = [
    {HALF: 1},
    {"x" * 100_000: 1},
    {"model": HALF},
    {"model": "x" * 100_000},
    {"stop": HALF},
    {"cache_salt": HALF},
    {"user": HALF, "metadata": {HALF: HALF}},
    {"chat_template_kwargs": {HALF: HALF}},
    {"chat_template_kwargs": nested(900)},
    {"chat_template_kwargs": {"messages": [], "bos_token": {}, "add_generation_prompt": 5}},
    {"metadata": nested(900)},
    {"messages": [{"role": HALF, "content": "a"}]},
    {"messages": [{"role": "user", "content": "a", "name": HALF}]},
    *({"guided_json": schema} for schema in (nested(60), nested(900), {"enum": [HALF]}, {"$ref": "#"}, False)),
    {"guided_json": {"$ref": "file:///etc/passwd"}},
    {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    *({"guided_regex": text} for text in (HALF, "(a{1,1000}){1,1000}", "(a+)+$", "\\", "")),
    {"guided_choice": [HALF]},
    {"guided_grammar": f'start: "{HALF}"'},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}], "tool_choice": "required"},
    *(
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]}
        for arguments in ("[" * 5000, '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", HALF)
    ),
    {"logit_bias": {str(token): -100 for token in range(512)}},
    {"stop_token_ids": list(range(512)), "min_tokens": 2},
    {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2},
    *({"temperature": value} for value in (1e-300, -0.0, 100)),
    {"top_p": 1e-300, "min_p": 1},
    {"top_k": 2**31 - 1},
    {"n": 256, "max_tokens": 1},
]


def test_whatever_a_body_holds_the_server_answers_and_lives(client: httpx.Client):
    for fields in HOSTILE:
        for stream in (False, True):
            body = {"messages": MESSAGES, "max_tokens": 4, "stream": stream, **fields}
            answer = client.post(CHAT, content=json.dumps(body), headers={"Content-Type": "application/json"})
            shown = json.dumps(fields)[:200]
            assert answer.status_code in (200, 400, 404), (shown, answer.text)
            assert answer.status_code == 200 or len(answer.content) < 10_000, f"what was sent is not sent back: {shown}"
    check_alive(client)


def test_a_null_character_is_a_character(client: httpx.Client):
    assert client.post(TEXT, json={"prompt": "a\0b", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", TEXT, 405), ("DELETE", "/v1/models", 405), ("GET", "/../etc/passwd", 404)],
)
def test_paths_and_methods_that_are_not_there_are_answered_in_the_same_shape(
    client: httpx.Client, method: str, path: str, status: int
):
    check_error(client.request(method, path), status)


def test_a_wrong_path_or_method_is_told_the_right_one(client: httpx.Client):
    """A base address without /v1 is the most common mistake."""
    wrong = client.post("/chat/completions", json={"messages": MESSAGES})
    assert wrong.status_code == 404 and "/v1/chat/completions" in wrong.json()["error"]["message"]
    got = client.get(CHAT)
    assert got.status_code == 405 and "only POST" in got.json()["error"]["message"] and got.headers["allow"] == "POST"


def test_two_requests_may_share_an_id(server: ServerProcess):
    """Each is answered, under an engine id of its own, and told its own id back."""
    import concurrent.futures

    def ask(prompt: str) -> httpx.Response:
        headers = {"X-Request-Id": "the-same"}
        body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        return httpx.post(server.url + TEXT, json=body, headers=headers, timeout=30)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, ["one", "two"] * 4))

    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert len({answer.json()["id"] for answer in answers}) == 8
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[::2] == [texts[0]] * 4 and texts[1::2] == [texts[1]] * 4


@pytest.mark.parametrize("sent", ["a" * 129, "a b", "\xe4"])
def test_an_id_that_cannot_be_sent_back_is_refused(client: httpx.Client, sent: str):
    check_error(client.get("/v1/models", headers={"X-Request-Id": sent.encode("latin-1")}), 400, "X-Request-Id")


def test_every_answer_has_an_id(client: httpx.Client):
    ids = [client.get("/v1/models").headers["x-request-id"] for _ in range(3)]
    assert len(set(ids)) == 3


MANY = 50_000


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({"prompt": "a"} | {f"k{index}": 1 for index in range(MANY)}, CompletionRequest),
        ({"prompt": "a", "guided_choice": [1] * MANY}, CompletionRequest),
        ({"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}, CompletionRequest),
        ({"prompt": "a", "stop_token_ids": ["a"] * MANY}, CompletionRequest),
        ({"messages": [{"role": "user", "content": "a"}], "modalities": ["a"] * MANY}, ChatRequest),
        ({"messages": [{f"k{index}": 1 for index in range(28)}] * 9999}, ChatRequest),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}, ChatRequest),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 128}, ChatRequest),
        ({"tokens": ["a"] * MANY}, DetokenizeRequest),
        ({"messages": [{}] * 9999}, TokenizeRequest),
    ],
)
def test_a_body_of_many_faults_is_read_up_to_the_first(body: dict, model: type[BaseModel]):
    """Listing a million faults takes half a minute, in which nobody else would be answered."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 64
