"""`octavo chat`, driven through stdin."""

from __future__ import annotations

import io
import json
import sys

import pytest

from octavo.testing.tiny_models import TinyModel, write_hf_model

OPTIONS = ("--max-tokens", "6", "--ignore-eos", "--threads", "1", "--num-blocks", "48", "--max-model-len", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(TinyModel(), tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def say(octavo, monkeypatch, model: str):
    def call(*lines: str, args: tuple[str, ...] = ()):
        text = "".join(line + "\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return octavo("chat", model, *OPTIONS, *args)

    return call


def test_each_turn_is_one_json_line_and_the_second_finds_the_first_in_the_cache(say) -> None:
    chat = say("hello", "and again", args=("--json",))

    first, second = (json.loads(line) for line in chat.out.splitlines())
    assert chat.code == 0
    assert first["schema"] == second["schema"] == "octavo.chat/1"
    assert first["cached_tokens"] == 0
    # Prompt and answer of the first turn but its last token, which was chosen and never computed.
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]


def test_reset_forgets_the_conversation_but_not_its_blocks(say) -> None:
    chat = say("hello", "/reset", "hello", args=("--json",))

    first, second = (json.loads(line) for line in chat.out.splitlines())
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert first["text"] == second["text"]
    assert second["cached_tokens"] == second["prompt_tokens"] - 1


def test_a_turn_reports_speed_and_hits_on_stderr_and_only_text_on_stdout(say) -> None:
    chat = say("hello", "/exit", "never said")

    assert chat.err.count("prompt tokens from the prefix cache") == 1
    assert "tokens/s" in chat.err and "prefix cache" not in chat.out


def test_a_conversation_that_became_too_long_is_refused_and_the_chat_goes_on(say) -> None:
    chat = say("x " * 200, "hi", args=("--json",))

    assert chat.code == 0
    assert "error[request-too-long]" in chat.err
    refused, answered = (json.loads(line) for line in chat.out.splitlines())
    assert (refused["schema"], refused["error"]["code"]) == ("octavo.error/1", "request-too-long")
    assert answered["schema"] == "octavo.chat/1"


def test_what_a_chat_cannot_show_is_refused(say) -> None:
    for args in (("-n", "2"), ("--logprobs", "1")):
        chat = say("hi", args=args)
        assert chat.code == 2 and args[0] in chat.err


def test_a_system_message_comes_first(say) -> None:
    plain, told = (say("hello", args=("--json", *args)) for args in ((), ("--system", "be brief")))
    assert json.loads(told.out)["prompt_tokens"] > json.loads(plain.out)["prompt_tokens"]
