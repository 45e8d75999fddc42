"""Log-probabilities cost memory: what one request may ask for, and all together."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError, QueueFullError
from octavo.server import logprobs, score_limits
from octavo.server.score_limits import MAX_OUTPUT_SCORES, ScoreLimits, count_output_scores
from octavo.testing.scripted_llm import LocalServer, scripted_llm

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]


def test_the_length_that_an_error_names_is_taken():
    params = {"n": 3, "temperature": 1.0, "logprobs": 20}
    with pytest.raises(InvalidParameterError) as caught:
        count_output_scores(SamplingParams(**params, max_tokens=None), [7, 7], longest_tokens=20_000, param="p")
    fits = int(caught.value.hints[0].split()[-1].replace(",", ""))

    def count(max_tokens: int) -> int:
        made = SamplingParams(**params, max_tokens=max_tokens)
        return count_output_scores(made, [7, 7], longest_tokens=20_000, param="p")

    assert MAX_OUTPUT_SCORES - 2 * 3 * 21 < count(fits) <= MAX_OUTPUT_SCORES
    with pytest.raises(InvalidParameterError):
        count(fits + 1)
    assert count_output_scores(SamplingParams(max_tokens=None), [7], longest_tokens=10**9, param="p") == 0


def test_what_is_promised_is_bounded_and_one_request_is_always_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(score_limits, "MAX_HELD_SCORES", 100)
    limits = ScoreLimits()
    limits.hold(200)
    with pytest.raises(QueueFullError):
        limits.hold(1)
    limits.release(200)
    limits.hold(60)
    limits.hold(40)
    with pytest.raises(QueueFullError):
        limits.hold(1)
    limits.release(60)
    limits.hold(50)


@pytest.fixture
def server(tiny_model: str):
    llm = scripted_llm(tiny_model, lambda _: [70] * 100, max_model_len=512)
    with LocalServer(llm) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "a", "n": 8, "logprobs": 1024, "max_tokens": 400}, "logprobs"),
        (TEXT, {"prompt": ["a"] * 8, "logprobs": 1024, "max_tokens": 400}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "n": 128, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_more_scores_than_fit_are_refused_by_the_field_that_asks(
    server: LocalServer, path: str, body: dict, param: str, stream: bool
):
    answer = httpx.post(server.url + path, json={**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and "scores of output tokens" in error["message"]


def test_promises_are_taken_back_however_a_request_ends(server: LocalServer, monkeypatch: pytest.MonkeyPatch):
    """Answered, streamed, refused by the engine, left by its client: then the whole room is there again."""
    body = {"prompt": "a", "max_tokens": 100, "logprobs": 9, "ignore_eos": True}
    monkeypatch.setattr(score_limits, "MAX_HELD_SCORES", 1500)
    server.llm.runner.pause_s = 0.004
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(2):
            assert client.post(TEXT, json=body).status_code == 200
            assert client.post(TEXT, json={**body, "stream": True}).text.endswith("[DONE]\n\n")
            assert client.post(TEXT, json={**body, "prompt": [9] * 500}).status_code == 400
            with client.stream("POST", TEXT, json={**body, "stream": True}) as leaving:
                lines = leaving.iter_lines()
                next(lines)
                crowded = httpx.post(server.url + TEXT, json=body)
                assert crowded.status_code == 429 and crowded.headers["retry-after"] == "5"
                assert httpx.post(server.url + TEXT, json={"prompt": "a"}).status_code == 200, "it asks for none"
            while_held_s = time.monotonic()
            while client.post(TEXT, json=body).status_code != 200:
                assert time.monotonic() - while_held_s < 20, "a client that left holds its promise"


def test_many_scores_are_written_aside_and_the_same(server: LocalServer, monkeypatch: pytest.MonkeyPatch):
    bodies = [
        (TEXT, {"prompt": [9] * 40, "echo": True, "logprobs": 5, "n": 2, "max_tokens": 20, "temperature": 0}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 9, "max_tokens": 20, "temperature": 0}),
    ]
    threads = set()
    real = logprobs.TokenSpelling.push

    def noting(self: logprobs.TokenSpelling, token_id: int) -> int:
        threads.add(threading.current_thread().name.partition("_")[0])
        return real(self, token_id)

    monkeypatch.setattr(logprobs.TokenSpelling, "push", noting)

    def ask(fields: dict) -> list[object]:
        with ThreadPoolExecutor(4) as pool:
            asked = [(path, {**body, **fields}) for path, body in bodies]
            answers = pool.map(lambda one: httpx.post(server.url + one[0], json=one[1]), asked)
            return [scores_of(each) for each in answers]

    here = [ask({}), ask({"stream": True})]
    assert not any(name.startswith("asyncio") for name in threads)
    threads.clear()
    monkeypatch.setattr(logprobs, "MANY_SCORES", 1)
    aside = [ask({}), ask({"stream": True})]

    assert aside == here and here[0] == here[1]
    assert all(name.startswith("asyncio") for name in threads), threads


def scores_of(answer: httpx.Response) -> dict[int, list[object]]:
    """Return the scores of each choice, of a whole answer or of all chunks of a stream."""
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    lines = (
        [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] if is_stream else [answer.text]
    )
    scores: dict[int, list[object]] = {}
    for choice in [choice for line in lines for choice in json.loads(line)["choices"]]:
        found = choice["logprobs"] or {}
        entries = found.get("content") or list(zip(*map(found.get, sorted(found)), strict=True))
        scores.setdefault(choice["index"], []).extend(entries)
    assert all(map(len, scores.values()))
    return scores
