"""Calls of tools over HTTP, said by a scripted model, read by the official clients."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.sse import read_stream

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ASK = [{"role": "user", "content": "How will the weather be?"}]


@pytest.fixture
def calling(tiny_model: str):
    llm = scripted_llm(
        tiny_model, lambda index: CALL if index == 0 else "It will rain.", num_blocks=256, max_model_len=2048
    )
    with LocalServer(llm) as server:
        yield server


def test_the_official_client_runs_a_call_to_its_end(calling: LocalServer):
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", timeout=60) as client:
        first = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
        (call,) = first.choices[0].message.tool_calls
        messages = [
            *ASK,
            first.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        second = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])

    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content is None
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    assert second.choices[0].message.content == "It will rain."
    assert second.choices[0].finish_reason == "stop"


def test_the_official_client_puts_a_streamed_call_together(calling: LocalServer):
    with (
        openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", timeout=60) as client,
        client.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER]) as stream,
    ):
        stream.until_done()
        (call,) = stream.current_completion_snapshot.choices[0].message.tool_calls

    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] == "Paris"


def test_langchain_binds_a_tool(calling: LocalServer):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{calling.url}/v1", api_key="none", model="tiny").bind_tools([WEATHER])

    (call,) = model.invoke("How will the weather be?").tool_calls
    assert call["name"] == "weather" and call["args"] == {"city": "Paris", "days": 2}


def test_a_call_that_is_cut_is_never_told_as_a_whole_one(tiny_model: str):
    """Every limit from 1 to the length of the call, streamed and whole: the same words, and the same end."""
    llm = scripted_llm(tiny_model, lambda _: CALL, num_blocks=256, max_model_len=2048)
    num_tokens = len(llm.runner.encode(CALL)) + 1
    ends = []
    with LocalServer(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for limit in range(1, num_tokens + 1):
            body = {"messages": ASK, "tools": [WEATHER], "max_tokens": limit}
            whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
            sent = client.post("/v1/chat/completions", json={**body, "stream": True}).text
            (streamed,) = read_stream(sent, is_chat=True, num_choices=1, wants_usage=False).choices
            calls = [call["function"] for call in whole["message"].get("tool_calls", [])]

            assert streamed.tool_calls == calls
            assert streamed.finish_reason == whole["finish_reason"]
            assert streamed.text == (whole["message"]["content"] or "")
            if whole["finish_reason"] == "tool_calls":
                assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Paris", "days": 2}]
            ends.append(whole["finish_reason"])

    assert ends == ["length"] * (num_tokens - 1) + ["tool_calls"]


def test_a_call_that_was_not_offered_is_text(calling: LocalServer):
    answer = httpx.post(f"{calling.url}/v1/chat/completions", json={"messages": ASK}, timeout=60).json()

    assert answer["choices"][0]["message"]["content"] == CALL
    assert "tool_calls" not in answer["choices"][0]["message"]


def test_no_call_is_made_where_none_is_wanted(calling: LocalServer):
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": "none"}
    answer = httpx.post(f"{calling.url}/v1/chat/completions", json=body, timeout=60).json()

    assert "tool_calls" not in answer["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [WEATHER]}, "tool_choice"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"functions": [WEATHER["function"]]}, "functions"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_choices_that_cannot_be_followed_are_refused_by_name(calling: LocalServer, fields: dict, param: str):
    answer = httpx.post(f"{calling.url}/v1/chat/completions", json={"messages": ASK, **fields}, timeout=60)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
