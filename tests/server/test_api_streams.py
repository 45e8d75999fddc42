"""Streams keep their rules, and say what a whole answer says."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from octavo.server.settings import ServerSettings
from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import ServerProcess
from octavo.testing.sse import read_stream, split_events
from octavo.testing.tiny_models import IM_END_ID

CHAT = {"messages": [{"role": "user", "content": "say something"}]}
TEXT = {"prompt": "say something"}


def post(url: str, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("wants_usage", [True, False], ids=["usage", "no usage"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "ending",
    [{"max_tokens": 12, "ignore_eos": True}, {"max_tokens": 40, "stop": ["a", "e", "q"]}, {"max_tokens": 1}],
    ids=["length", "stop", "one token"],
)
def test_a_stream_keeps_its_rules_and_says_what_a_whole_answer_says(
    server: ServerProcess, is_chat: bool, wants_usage: bool, n: int, ending: dict
):
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = {**(CHAT if is_chat else TEXT), **ending, "n": n, "seed": 11, "logprobs": True if is_chat else 1}
    options = {"stream": True} | ({"stream_options": {"include_usage": True}} if wants_usage else {})

    whole = post(server.url, path, body).json()
    answer = post(server.url, path, {**body, **options})

    assert answer.headers["content-type"].startswith("text/event-stream")
    streamed = read_stream(answer.text, is_chat=is_chat, num_choices=n, wants_usage=wants_usage)
    for choice, sent in zip(whole["choices"], streamed.choices, strict=True):
        assert sent.text == (choice["message"]["content"] if is_chat else choice["text"])
        assert sent.finish_reason == choice["finish_reason"]
        assert sent.token_scores == choice["logprobs"]["content" if is_chat else "tokens"]
    if wants_usage:
        assert streamed.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"], "the prompt counts once"
        assert streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_that_ends_at_once_still_begins_and_ends(tiny_model: str, n: int):
    with LocalServer(scripted_llm(tiny_model, lambda _: [IM_END_ID])) as server:
        answer = post(server.url, "/v1/chat/completions", {**CHAT, "stream": True, "n": n})
        whole = post(server.url, "/v1/chat/completions", {**CHAT, "n": n}).json()

    streamed = read_stream(answer.text, is_chat=True, num_choices=n, wants_usage=False)
    assert [(choice.text, choice.finish_reason) for choice in streamed.choices] == [("", "stop")] * n
    assert [choice["message"]["content"] for choice in whole["choices"]] == [""] * n


def test_a_stream_of_several_prompts_keeps_their_answers_apart(server: ServerProcess):
    body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 10, "seed": 3, "echo": True, "logprobs": 0}

    whole = post(server.url, "/v1/completions", body).json()
    streamed = read_stream(
        post(server.url, "/v1/completions", {**body, "stream": True}).text,
        is_chat=False,
        num_choices=6,
        wants_usage=False,
    )

    assert [choice.text for choice in streamed.choices] == [choice["text"] for choice in whole["choices"]]
    for index, choice in enumerate(streamed.choices):
        assert choice.text.startswith(body["prompt"][index // 2])


def test_characters_of_several_tokens_come_whole(tiny_model: str):
    said = "grüße 👩‍👩‍👧 한국어 नमस्ते  two  spaces ."
    with LocalServer(scripted_llm(tiny_model, lambda _: said)) as server:
        answer = post(server.url, "/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True})

    (choice,) = read_stream(answer.text, is_chat=True, num_choices=1, wants_usage=False).choices
    assert choice.text == said
    assert b"".join(bytes(score["bytes"]) for score in choice.token_scores).decode() == said


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_that_are_no_text_become_replacement_characters_and_nothing_worse(tiny_model: str, stream: bool):
    broken = [3 + 256 - 5, 70, 3 + 256 - 68]  # ids of single bytes of the tiny vocabulary, no UTF-8 in this order
    with LocalServer(scripted_llm(tiny_model, lambda _: broken)) as server:
        answer = post(server.url, "/v1/completions", {**TEXT, "stream": stream, "logprobs": 3, "max_tokens": 9})
        assert answer.status_code == 200

    text = (
        read_stream(answer.text, is_chat=False, num_choices=1, wants_usage=False).choices[0].text
        if stream
        else json.loads(answer.text)["choices"][0]["text"]
    )
    assert text.count("\N{REPLACEMENT CHARACTER}") == 2 and len(text) == 3


def test_silence_is_filled_with_comments_until_the_answer_comes(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "done")
    llm.runner.gate.clear()
    with LocalServer(llm, ServerSettings(keep_alive=0.05)) as server:
        timer = threading.Timer(0.5, llm.runner.gate.set)
        timer.start()
        answer = post(server.url, "/v1/completions", {**TEXT, "stream": True})
        timer.join()

    streamed = read_stream(answer.text, is_chat=False, num_choices=1, wants_usage=False)
    assert streamed.num_comments >= 2 and streamed.choices[0].text == "done"


def test_an_engine_that_fails_in_a_stream_is_told_in_it_and_serves_the_next(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "some words that take a few steps")
    llm.runner.pause_s = 0.02
    with LocalServer(llm) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**TEXT, "stream": True, "max_tokens": 30}
        ) as sent:
            lines = sent.iter_lines()
            first = next(lines)
            llm.runner.failure = RuntimeError("the model broke")
            rest = [line for line in lines if line]
        llm.runner.failure = None
        after = post(server.url, "/v1/completions", TEXT)

    assert first.startswith("data: {")
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "model broke" not in error["message"]
    assert after.status_code == 200


def test_an_engine_that_fails_is_a_500_of_that_request_alone(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: "hello")
    with LocalServer(llm) as server:
        llm.runner.failure = RuntimeError("the model broke")
        failed = post(server.url, "/v1/chat/completions", CHAT)
        llm.runner.failure = None
        answered = post(server.url, "/v1/chat/completions", CHAT)

    assert failed.status_code == 500 and failed.json()["error"]["code"] == "request-failed"
    assert answered.json()["choices"][0]["message"]["content"] == "hello"


def test_events_are_sent_unbuffered_and_never_stored(server: ServerProcess):
    answer = post(server.url, "/v1/completions", {**TEXT, "stream": True})

    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert split_events(answer.text)[0][-1] == "[DONE]"


def test_a_bug_of_ours_ends_one_request_and_says_nothing_of_its_text(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: object) -> None:
        raise KeyError("a slip")

    with LocalServer(scripted_llm(tiny_model, lambda _: "hello")) as server:
        with monkeypatch.context() as patch:
            patch.setattr("octavo.server.completions._Choice.push", fail)
            whole = post(server.url, "/v1/completions", {"prompt": "zebra"})
            streamed = post(server.url, "/v1/completions", {"prompt": "zebra", "stream": True})
        answered = post(server.url, "/v1/completions", TEXT)
        at_rest = httpx.get(f"{server.url}/kv").json()["totals"]

    assert whole.status_code == 500 and whole.json()["error"]["code"] == "internal"
    assert streamed.status_code == 200
    (error,) = split_events(streamed.text)[0]
    assert json.loads(error)["error"]["code"] == "internal"
    assert "a slip" not in whole.text + streamed.text
    assert answered.status_code == 200
    assert at_rest["referenced_blocks"] == at_rest["num_running"] == 0, "their requests have ended"
    assert caplog.text.count("KeyError") >= 2 and "zebra" not in caplog.text
