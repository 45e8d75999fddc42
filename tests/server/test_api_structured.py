"""JSON, schemas, expressions and choices over HTTP, held by the grammar with a model that would say anything else."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest
from pydantic import BaseModel

from octavo.testing.server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2, 3]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "tell me"}]


def ask(server: ServerProcess, **fields: object) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 200, "seed": 5, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "guided_json", "guided_json text", "structured_outputs"],
)
def test_a_schema_is_kept_to_in_every_spelling(server: ServerProcess, fields: dict):
    choice = ask(server, **fields).json()["choices"][0]

    assert choice["finish_reason"] == "stop"
    said = json.loads(choice["message"]["content"])
    assert set(said) == {"ok", "size"} and said["size"] in (1, 2, 3) and type(said["ok"]) is bool


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_regex": "[a-c]{4}[0-9]"}, "[a-c]{4}[0-9]"),
        ({"structured_outputs": {"regex": "x+y"}}, "x+y"),
        ({"guided_grammar": 'start: "a" ("b" | "c")'}, "a[bc]"),
    ],
)
def test_choices_expressions_and_grammars_are_kept_to(server: ServerProcess, fields: dict, pattern: str):
    choice = ask(server, **fields, temperature=0.5).json()["choices"][0]

    assert re.fullmatch(pattern, choice["message"]["content"]) or choice["finish_reason"] == "length"
    assert choice["finish_reason"] == "stop" or pattern == "x+y"


def test_the_official_client_parses_into_a_class(server: ServerProcess):
    class Answer(BaseModel):
        ok: bool

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        answer = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Answer, max_tokens=200)

    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_a_structured_answer_that_is_cut_says_so(server: ServerProcess):
    choice = ask(server, guided_json=SCHEMA, max_tokens=2).json()["choices"][0]

    assert choice["finish_reason"] == "length"


def test_a_required_call_is_made_by_any_model(server: ServerProcess):
    tool = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
    choice = ask(server, tools=[tool], tool_choice="required", parallel_tool_calls=False).json()["choices"][0]

    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "pick" and set(json.loads(call["function"]["arguments"])) == {"ok", "size"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"type": "no such type"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"guided_json": SCHEMA, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_followed_is_refused_under_its_own_name(server: ServerProcess, fields: dict, param: str):
    answer = ask(server, **fields)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
