"""Tool calls of chats: what the model is told and held to, and how what it says becomes OpenAI's `tool_calls`."""

from __future__ import annotations

import secrets
from typing import Any

from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError
from octavo.server.errors import renamed
from octavo.server.protocol_chat import ChatRequest, NamedTool, Tool
from octavo.server.tool_parsers.deltas import ArgumentsDelta, ContentDelta, ToolCallStart, ToolDelta
from octavo.server.tool_parsers.formats import make_tool_parser
from octavo.server.tool_parsers.grammar import tool_grammar


def shown_tools(body: ChatRequest) -> list[Tool]:
    """Return the tools that the model is told of; none where it may not call any."""
    return [] if body.tool_choice == "none" else body.tools


def required_calls(body: ChatRequest, form: str) -> StructuredOutput | None:
    """Return what holds the model to a call, where one is required.

    Raises:
        InvalidParameterError: the choice has no tools, another structure is asked for besides, or the tools are too
            large for a grammar.
    """
    choice = body.tool_choice
    if choice is not None and choice != "none" and not body.tools:
        raise InvalidParameterError("given without tools", param="tool_choice")
    if choice in (None, "none", "auto"):
        return None
    if body.structured() is not None:
        raise InvalidParameterError(
            "a call is required, and the text has to be something else", param="tool_choice", hints=("ask for one",)
        )
    try:
        return tool_grammar(
            form,
            [tool.model_dump(exclude_unset=True) for tool in body.tools],
            named=choice.function.name if isinstance(choice, NamedTool) else None,
            is_parallel=body.parallel_tool_calls,
        )
    except InvalidParameterError as error:
        raise error if error.param != "structured" else renamed(error, "tools") from error


class SaidAsCalls:
    """Reads one answer as calls and content; without tools, everything is content."""

    def __init__(self, body: ChatRequest, form: str) -> None:
        tools = shown_tools(body)
        self._parser = make_tool_parser(form, [tool.function.name for tool in tools]) if tools else None

    def push(self, text: str) -> list[ToolDelta]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        return self._parser.push(text)

    def finish(self, reason: str) -> tuple[list[ToolDelta], str]:
        """Return what was held back, and the reason that clients are told."""
        if self._parser is None:
            return [], reason
        end = self._parser.finish(reason)
        return list(end.deltas), end.finish_reason


class CallList:
    """The calls of one message, as they grow."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []

    def chunk(self, delta: ToolCallStart | ArgumentsDelta) -> dict[str, Any]:
        """Return a delta as an entry of `delta.tool_calls`.

        Mutates: this list, by the delta.
        """
        if isinstance(delta, ToolCallStart):
            function = {"name": delta.name, "arguments": ""}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            self._calls.append({**call, "function": dict(function)})
            return {"index": delta.index, **call}
        self._calls[delta.index]["function"]["arguments"] += delta.text
        return {"index": delta.index, "function": {"arguments": delta.text}}

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self._calls
