"""The official clients, unchanged, against a real server process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import time

import openai
import pytest

from octavo.testing.scripted_llm import LocalServer, scripted_llm
from octavo.testing.server_process import SMALL, ServerProcess

TURNS = ("hello there", "and then", "what else")


@pytest.fixture
def client(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_models_are_listed_and_looked_up(client: openai.OpenAI):
    (model,) = client.models.list().data

    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_conversation_goes_on_and_finds_its_own_prefix(client: openai.OpenAI):
    messages = [{"role": "system", "content": "answer"}]
    cached = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached.append((answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens))

    for (_, earlier), (hit, _) in itertools.pairwise(cached):
        assert hit >= earlier // 16 * 16, "every later turn begins with the one before"


def test_streamed_and_whole_chats_say_the_same(client: openai.OpenAI):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 7, "n": 2}

    whole = client.chat.completions.create(**asked, temperature=1.0)
    chunks = list(
        client.chat.completions.create(**asked, temperature=1.0, stream=True, stream_options={"include_usage": True})
    )

    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_come_with_bytes_that_spell_the_text(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=20, logprobs=True, top_logprobs=3
    )

    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    spelled = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", errors="replace")
    assert spelled == answer.choices[0].message.content


def test_completions_take_every_form_of_prompt(client: openai.OpenAI):
    forms = ["ab cd", ["ab cd", "ef"], [70, 71, 72], [[70, 71, 72], [73]]]
    counts = [len(client.completions.create(model="tiny", prompt=form, max_tokens=3).choices) for form in forms]

    assert counts == [1, 2, 1, 2]


def test_the_helper_for_streams_puts_an_answer_together(client: openai.OpenAI):
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=10
    ) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot  # asking for the final one raises where the limit cut it

    assert final.choices[0].finish_reason in ("stop", "length")
    assert final.choices[0].message.content


def test_many_async_streams_run_at_once(server: ServerProcess):
    async def one(client: openai.AsyncOpenAI, index: int) -> tuple[str, str]:
        asked = {"model": "tiny", "prompt": f"request {index}", "max_tokens": 20, "temperature": 0}
        text = ""
        async for chunk in await client.completions.create(**asked, stream=True):
            text += chunk.choices[0].text
        return text, (await client.completions.create(**asked)).choices[0].text

    async def run() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=60) as client:
            return await asyncio.gather(*(one(client, index) for index in range(40)))

    for streamed, whole in asyncio.run(run()):
        assert streamed == whole


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 5000}),
        (openai.BadRequestError, {"extra_body": {"no_such_field": 1}}),
        (openai.NotFoundError, {"model": "gpt-4"}),
    ],
)
def test_each_mistake_raises_the_clients_own_exception(client: openai.OpenAI, error: type[Exception], asked: dict):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": [{"role": "user", "content": "a"}], **asked})

    assert caught.value.body["message"]
    assert caught.value.body["type"]
    assert caught.value.code


def test_a_request_that_cannot_fit_is_told_the_length_that_would(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match=r"at most 1,0.. output tokens") as caught:
        client.completions.create(model="tiny", prompt="hello", max_tokens=1024)

    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    fitting = int(caught.value.body["message"].split("at most ")[1].split(" ")[0].replace(",", ""))
    assert client.completions.create(model="tiny", prompt="hello", max_tokens=fitting, stop="a").choices


def test_a_wrong_key_raises_the_clients_own_exception(tiny_model: str):
    environ = {"OCTAVO_API_KEY": "right"}
    with ServerProcess(tiny_model, *SMALL, environ=environ) as server:
        good, bad = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("right", "no"))

        assert good.models.list().data
        with pytest.raises(openai.AuthenticationError):
            bad.models.list()
        good.close()
        bad.close()


def test_langchain_talks_to_it(server: ServerProcess):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{server.url}/v1", api_key="unused", model="tiny", max_tokens=10, temperature=0)

    whole = model.invoke("hi")
    parts = list(model.stream("hi"))

    assert whole.content == "".join(part.content for part in parts)
    assert whole.usage_metadata["output_tokens"] <= 10


def test_every_kind_of_failure_has_an_exception_of_the_client(tiny_model: str):
    """What a full queue, a failing step, a drain and an error inside a stream are to the official client."""
    llm = scripted_llm(tiny_model, lambda _: "some words", max_num_seqs=1, max_waiting=1)
    with LocalServer(llm) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30)
        ask = functools.partial(client.completions.create, model="tiny", prompt="hi")

        with pytest.raises(openai.BadRequestError) as not_fitting:
            ask(prompt=[5] * 600)
        with pytest.raises(openai.NotFoundError):
            ask(model="other")
        with pytest.raises(openai.PermissionDeniedError):
            ask(extra_headers={"Host": "other.example"})
        with pytest.raises(openai.APIStatusError) as too_large:
            ask(prompt="a" * (5 << 20))
        llm.runner.failure = RuntimeError("broken")
        with pytest.raises(openai.InternalServerError):
            ask()
        llm.runner.failure = None
        llm.runner.pause_s = 0.05
        chunks = iter(ask(stream=True))
        assert next(chunks).choices
        llm.runner.failure = RuntimeError("broken in the middle")
        with pytest.raises(openai.APIError, match="failed in a step"):
            list(chunks)
        llm.runner.failure = None
        llm.runner.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(ask) for _ in range(2)]
            while llm.health.num_running + llm.health.num_waiting < 2:
                time.sleep(0.01)
            with pytest.raises(openai.RateLimitError) as full:
                ask()
            llm.runner.gate.set()
            assert all(each.result().choices for each in waiting)
        client.close()

    assert not_fitting.value.code == "context_length_exceeded"
    assert too_large.value.status_code == 413
    assert int(full.value.response.headers["retry-after"]) >= 1


def test_the_async_client_runs_a_conversation(server: ServerProcess):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=60) as client:
            messages = [{"role": "user", "content": "hello"}]
            whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=9, temperature=0)
            text = ""
            async for chunk in await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=9, temperature=0, stream=True, n=1
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="tiny", messages=[])

    asyncio.run(run())
