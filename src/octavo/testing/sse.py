"""Reading server-sent events, and the rules that a stream of completions or chats keeps (a state machine).

begin ─▶ per choice: role once (chat) ─▶ text, logprobs, calls ─▶ one end with its reason, and nothing after it
      ─▶ usage, alone and only if asked for ─▶ [DONE]
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_END = ("stop", "length", "tool_calls")


@dataclass(slots=True)
class StreamedChoice:
    """One answer, put together from its chunks."""

    text: str = ""
    token_scores: list[Any] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    has_role: bool = False
    finish_reason: str | None = None


@dataclass(slots=True)
class Streamed:
    """A whole stream that kept the rules."""

    choices: list[StreamedChoice]
    usage: dict[str, Any] | None
    num_comments: int


def read_stream(body: str, *, is_chat: bool, num_choices: int, wants_usage: bool) -> Streamed:
    """Check a stream against the rules and put its answers together.

    Raises:
        AssertionError: a rule is broken.
    """
    events, num_comments = split_events(body)
    assert events and events[-1] == "[DONE]", "the last event is [DONE]"
    chunks = [json.loads(event, parse_constant=_refuse) for event in events[:-1]]
    heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
    assert len(heads) == 1, "id, created, model and object never change"
    assert next(iter(heads))[3] == ("chat.completion.chunk" if is_chat else "text_completion")
    usage = None
    if wants_usage:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"], "usage comes last, alone"
        usage = last["usage"]
    choices = [StreamedChoice() for _ in range(num_choices)]
    for chunk in chunks:
        assert len(chunk["choices"]) == 1
        assert ("usage" in chunk) == wants_usage and chunk.get("usage") is None
        _take(choices, chunk["choices"][0], is_chat=is_chat)
    assert all(choice.finish_reason for choice in choices), "every answer ends"
    return Streamed(choices=choices, usage=usage, num_comments=num_comments)


def split_events(body: str) -> tuple[list[str], int]:
    """Return the data of each event, and how many comments there were."""
    assert body.endswith("\n\n"), "the last event is complete"
    blocks = body.split("\n\n")[:-1]
    assert all(block.startswith(("data: ", ":")) and "\n" not in block for block in blocks)
    return [block[6:] for block in blocks if block.startswith("data: ")], sum(b.startswith(":") for b in blocks)


def _take(choices: list[StreamedChoice], sent: dict[str, Any], *, is_chat: bool) -> None:
    choice = choices[sent["index"]]
    assert choice.finish_reason is None, "nothing comes after the end of an answer"
    assert sent["finish_reason"] is None or sent["finish_reason"] in _END
    delta = sent["delta"] if is_chat else {"content": sent["text"]}
    if is_chat:
        if not choice.has_role:
            assert delta == {"role": "assistant", "content": ""}, "an answer begins with its role"
            choice.has_role = True
            return
        assert "role" not in delta, "the role comes once"
    text = delta.get("content") or ""
    assert not (text and sent["finish_reason"]), "text and end come apart"
    choice.text += text
    _take_calls(choice, delta.get("tool_calls") or ())
    scores = sent["logprobs"]
    if scores is not None:
        choice.token_scores += scores["content"] if is_chat else scores["tokens"]
    choice.finish_reason = sent["finish_reason"]


def _take_calls(choice: StreamedChoice, deltas: Iterable[dict[str, Any]]) -> None:
    for delta in deltas:
        if delta["index"] == len(choice.tool_calls):
            assert delta["id"] and delta["type"] == "function" and delta["function"]["name"]
            choice.tool_calls.append({"name": delta["function"]["name"], "arguments": ""})
        choice.tool_calls[delta["index"]]["arguments"] += delta["function"]["arguments"]


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
