"""What becomes of a text on its way in: templates, the beginning of a sequence, content in parts, ids as they are."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import ServerProcess
from octavo.testing.tiny_models import ENDOFTEXT_ID, TinyModel, make_tokenizer, write_hf_model

TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "go"},
]


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def ids_of(client: httpx.Client, **body: object) -> list[int]:
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_a_text_becomes_ids_and_comes_back(client: httpx.Client):
    for text in ("hello", " two  spaces ", "grüße 🙂\n", "<|im_start|>user"):
        answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 1024
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": TURNS}, {"prompt": 5}, {"messages": []}, {"prompt": "\ud800"}]
)
def test_what_is_no_text_is_refused(client: httpx.Client, body: dict):
    headers = {"Content-Type": "application/json"}
    assert client.post("/tokenize", content=json.dumps(body), headers=headers).status_code == 400


@pytest.mark.parametrize("tokens", [[512], [-1], ["a"], None, [2**70]])
def test_ids_that_are_none_are_refused(client: httpx.Client, tokens: object):
    assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_a_chat_is_the_templates_text_and_nothing_else(client: httpx.Client):
    rendered = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in TURNS)
    rendered += "<|im_start|>assistant\n"

    ids = ids_of(client, messages=TURNS)
    used = client.post("/v1/chat/completions", json={"messages": TURNS, "max_tokens": 1}).json()["usage"]

    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == rendered
    assert ids == ids_of(client, prompt=rendered, add_special_tokens=False)
    assert used["prompt_tokens"] == len(ids)


def test_content_in_parts_is_the_content(client: httpx.Client):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert ids_of(client, messages=[{"role": "user", "content": parts}]) == ids_of(
        client, messages=[{"role": "user", "content": "hello"}]
    )


def test_developers_speak_as_the_system_where_a_template_knows_none(client: httpx.Client):
    assert ids_of(client, messages=[{"role": "developer", "content": "be brief"}, *TURNS]) == ids_of(
        client, messages=[{"role": "system", "content": "be brief"}, *TURNS]
    )


@pytest.fixture(scope="module")
def bos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer adds a beginning of sequence, and whose template writes one."""
    folder = write_hf_model(TinyModel(), tmp_path_factory.mktemp("bos"))
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer = make_tokenizer(512) | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        }
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_sequence_begins_once_whichever_way_in(bos_model: Path):
    local = LocalServer(scripted_llm(bos_model, lambda _: "ok"))
    with local as server, httpx.Client(base_url=server.url, timeout=30) as client:
        chat = ids_of(client, messages=TURNS)
        rendered = client.post("/detokenize", json={"tokens": chat}).json()["prompt"]
        raw = ids_of(client, prompt="hello")

        assert chat.count(ENDOFTEXT_ID) == 1 and chat[0] == ENDOFTEXT_ID
        assert ids_of(client, prompt=rendered) == chat, "a pasted chat gets no second one"
        assert raw[0] == ENDOFTEXT_ID and raw.count(ENDOFTEXT_ID) == 1
        assert ids_of(client, prompt="hello", add_special_tokens=False) == raw[1:]

        def used(**body: object) -> int:
            return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]

        assert used(prompt="hello") == len(raw)
        assert used(prompt=raw[1:]) == len(raw) - 1, "ids are taken as they are"
        assert used(prompt="hello", add_special_tokens=False) == len(raw) - 1


def test_a_template_without_a_beginning_gets_none(tmp_path: Path, bos_model: Path):
    """The model's maker decided so, whatever the tokenizer would put before a text."""
    for file in bos_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].removeprefix("{{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    local = LocalServer(scripted_llm(tmp_path, lambda _: "ok"))
    with local as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert ENDOFTEXT_ID not in ids_of(client, messages=TURNS)
        assert ids_of(client, prompt="a")[0] == ENDOFTEXT_ID


def test_a_model_without_a_template_says_so(tmp_path: Path):
    folder = write_hf_model(TinyModel(), tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    with LocalServer(scripted_llm(folder, lambda _: "ok")) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": TURNS})

    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_a_template_that_refuses_or_runs_away_ends_its_request_only(tmp_path: Path):
    folder = write_hf_model(TinyModel(), tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if messages[0].content == 'loop' %}{% for i in range(10**9) %}{% endfor %}{% endif %}"
        "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    with LocalServer(scripted_llm(folder, lambda _: "ok")) as server:

        def ask(content: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": content}]}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

        refused, runaway, good = ask("no"), ask("loop"), ask("hello")

    assert refused.status_code == 400 and "not this" in refused.json()["error"]["message"]
    assert runaway.status_code == 400
    assert good.status_code == 200
