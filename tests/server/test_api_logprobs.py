"""Log-probabilities, echo, and the scores of a prompt: what evaluations and agents compute with."""

from __future__ import annotations

import json
import math

import httpx
import pytest

from octavo.core.sampling import SamplingParams
from octavo.llm.offline import LLM
from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import ServerProcess

PAIRS = [(f"the {word} is", f" {end}") for word in ("cat", "sun", "old man") for end in ("here", "gone")]


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def offline(tiny_model: str) -> LLM:
    return LLM(tiny_model, threads=1, num_blocks=256, max_model_len=1024)


def complete(client: httpx.Client, **body: object) -> dict:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_scores_every_token_of_the_prompt_cold_and_warm(client: httpx.Client, offline: LLM, max_tokens: int):
    for context, end in PAIRS:
        text = context + end
        reference = offline.generate([text], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))[0]
        ids = reference.prompt_token_ids
        expected = [
            None,
            *(scores[token] for token, scores in zip(ids[1:], reference.prompt_logprobs[1:], strict=True)),
        ]

        for _ in range(2):
            answer = complete(client, prompt=text, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
            (choice,) = answer["choices"]
            scores = choice["logprobs"]
            num_prompt = len(ids)

            assert len(scores["tokens"]) == len(scores["top_logprobs"]) == num_prompt + max_tokens
            assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
            assert scores["token_logprobs"][1:num_prompt] == [each.logprob for each in expected[1:]]
            assert choice["text"].startswith(text) and (max_tokens or choice["text"] == text)
            assert answer["usage"]["completion_tokens"] == max_tokens
            assert scores["text_offset"] == sorted(scores["text_offset"])
            starts = zip(scores["tokens"], scores["text_offset"], strict=True)
            assert all(choice["text"].startswith(token, offset) for token, offset in starts)


def test_the_likelier_end_of_a_sentence_is_the_one_that_the_model_says(client: httpx.Client, offline: LLM):
    """What likelihood evaluations do: score each continuation by the sum of its tokens."""

    def served(context: str, end: str) -> float:
        answer = complete(client, prompt=context + end, echo=True, logprobs=0, max_tokens=0)
        scores = answer["choices"][0]["logprobs"]
        return sum(
            score
            for score, offset in zip(scores["token_logprobs"], scores["text_offset"], strict=True)
            if offset >= len(context) and score is not None
        )

    def alone(context: str, end: str) -> float:
        output = offline.generate([context + end], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
        num_context = len(offline.tokenizer.encode(context))
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[num_context:]
        return sum(scores[token].logprob for token, scores in pairs)

    for context, _ in PAIRS[::2]:
        assert [served(context, end) for end in (" here", " gone")] == [
            alone(context, end) for end in (" here", " gone")
        ]


def test_echo_without_scores_is_the_prompt(client: httpx.Client):
    (choice,) = complete(client, prompt="hello", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("hello", None, "length")
    (choice,) = complete(client, prompt=[107, 374, 111, 114], echo=True, max_tokens=0)["choices"]
    assert choice["text"] == "hello"


def test_prompt_scores_come_in_vllms_shape_too(client: httpx.Client):
    (choice,) = complete(client, prompt="hello", prompt_logprobs=2, max_tokens=1)["choices"]

    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == 3
    for scores in others:
        assert {score["rank"] for score in scores.values()} >= {1, 2}
        assert all(set(score) == {"logprob", "rank", "decoded_token"} for score in scores.values())


@pytest.mark.parametrize("top", [0, 1, 5])
def test_alternatives_are_in_order_and_no_more_likely_than_everything(client: httpx.Client, top: int):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "temperature": 0}
    answer = client.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": top}).json()

    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == top
        logprobs = [each["logprob"] for each in entry["top_logprobs"]]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-6
        if top:
            assert entry["top_logprobs"][0]["bytes"] == entry["bytes"], "greedy takes the likeliest"


def test_impossible_alternatives_are_numbers_that_json_has(tiny_model: str):
    """The script's alternatives all have minus infinity, as masks and biases make them."""
    said = "“curly” 🙂"
    with LocalServer(scripted_llm(tiny_model, lambda _: said)) as server:
        text = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "logprobs": 3, "max_tokens": 30}).text
        chat_body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}
        chat = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body).text

    scores = json.loads(text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert -9999.0 in {value for top in scores["top_logprobs"] for value in top.values()}
    content = json.loads(chat, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == said
    assert {each["logprob"] for entry in content for each in entry["top_logprobs"]} == {-0.5, -9999.0}


def test_parts_of_characters_are_keys_of_their_own(tiny_model: str):
    with LocalServer(scripted_llm(tiny_model, lambda _: "🙂")) as server:
        body = {"prompt": "a", "logprobs": 1, "max_tokens": 30}
        scores = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["logprobs"]

    parts = scores["tokens"][:4]
    assert parts == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert scores["text_offset"][:4] == [0, 0, 0, 0]


def test_online_and_offline_answers_are_the_same_bits(client: httpx.Client, offline: LLM):
    """Same prompt, same seed: same tokens and same scores, whichever way in."""
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=42, logprobs=0)
    texts = ["one", "two three", "ünïcödé 🙂"]
    outputs = offline.generate(texts, params)

    answer = complete(client, prompt=texts, max_tokens=20, temperature=0.9, seed=42, logprobs=0)

    for output, choice in zip(outputs, answer["choices"], strict=True):
        assert choice["text"] == output.outputs[0].text
        chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        assert choice["logprobs"]["token_logprobs"] == [scores[token].logprob for token, scores in chosen]


def test_chats_are_formatted_online_as_offline(client: httpx.Client, offline: LLM):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi 🙂"}]
    output = offline.chat(messages, SamplingParams(max_tokens=10, temperature=0))[0]

    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 10, "temperature": 0}).json()

    assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.parametrize("n", [1, 64])
def test_more_scores_of_a_prompt_than_anyone_reads_are_refused_before_they_are_computed(client: httpx.Client, n: int):
    """A single request could otherwise fill the memory: a thousand candidates, for each token, in each choice."""
    prompt = [5 + index % 400 for index in range(900)]
    most = 2**18 // (len(prompt) * n) - 1
    asked = {"prompt": prompt, "max_tokens": 1, "n": n}
    for field, fields in (("prompt_logprobs", {}), ("logprobs", {"echo": True})):
        refused = client.post("/v1/completions", json={**asked, **fields, field: most + 1})
        assert refused.status_code == 400, refused.text[:200]
        error = refused.json()["error"]
        assert error["param"] == field and "262,144" in error["message"]
    scores = complete(client, **asked, prompt_logprobs=most)["choices"][-1]["prompt_logprobs"]
    assert len(scores) == 900 and all(len(each) >= most for each in scores[1:])


def test_a_chat_lists_the_scores_of_its_prompt_once(client: httpx.Client):
    body = {"messages": [{"role": "user", "content": "a" * 600}], "max_tokens": 1, "prompt_logprobs": 1024}
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
    answer = client.post("/v1/chat/completions", json={**body, "prompt_logprobs": 2, "n": 2}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_an_echo_count_the_special_tokens_that_its_text_shows(client: httpx.Client, skips: bool):
    marked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for prompt in (marked, client.post("/tokenize", json={"prompt": marked}).json()["tokens"]):
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "skip_special_tokens": skips}
        choice = complete(client, **body)["choices"][0]
        scores, text = choice["logprobs"], choice["text"]
        assert ("<|im_end|>" in text) == (prompt is marked or not skips)
        shown = [
            (token, offset)
            for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True)
            if token in text  # the marks of ids are skipped where that is asked for
        ]
        assert len(shown) >= len(scores["tokens"]) - 3 and shown[-1][1] == len(text) - 1
        for token, offset in shown:
            assert text[offset : offset + len(token)] == token


def test_every_choice_lists_the_scores_of_its_prompt_once(client: httpx.Client):
    for max_tokens in (0, 1):
        body = {"prompt": [10, 20, 30, 40], "max_tokens": max_tokens, "echo": True, "logprobs": 1, "n": 3}
        choices = complete(client, **body)["choices"]
        assert [len(each["logprobs"]["tokens"]) for each in choices] == [4 + max_tokens] * 3
        choices = complete(client, **body, prompt_logprobs=2)["choices"]
        assert [len(each["prompt_logprobs"]) for each in choices] == [4] * 3
