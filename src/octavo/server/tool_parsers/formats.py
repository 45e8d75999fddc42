"""The formats of calls that models write, by name, and which one a model was trained on."""

from __future__ import annotations

from collections.abc import Collection

from octavo.errors import InvalidParameterError
from octavo.server.tool_parsers.deltas import ToolParser
from octavo.server.tool_parsers.parser import CallFormat, CallParser

HERMES = CallFormat(open_tag="<tool_call>", close_tag="</tool_call>")
r"""`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, as Hermes and Qwen models write it."""

LLAMA3_JSON = CallFormat(
    open_tag="<|python_tag|>",
    separator=";",
    takes_bare=True,
    argument_keys=("parameters", "arguments"),
    needs_arguments=True,
)
"""`{"name": ..., "parameters": {...}}`, as Llama 3.1 and 3.2 write it, maybe after a tag, maybe several with `;`."""

CALL_FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}


def make_tool_parser(name: str, names: Collection[str] | None = None) -> ToolParser:
    """Return a parser for one answer.

    Args:
        name: Of a format.
        names: Functions that the caller offered; a call of another one is content. `None` takes any.

    Raises:
        InvalidParameterError: no such format.
    """
    return CallParser(call_format(name), names)


def call_format(name: str) -> CallFormat:
    """Return a format by its name.

    Raises:
        InvalidParameterError: no such format.
    """
    try:
        return CALL_FORMATS[name]
    except KeyError:
        raise InvalidParameterError(
            f"{name!r} is not a known format of tool calls",
            param="tool_call_parser",
            hints=(f"formats: {', '.join(CALL_FORMATS)}",),
        ) from None


def detect_tool_format(chat_template: str | None) -> str:
    """Return the name of the format that a chat template teaches.

    A template that says nothing of tools gets `hermes`: there the calls are taught by `describe_tools`.
    """
    template = chat_template or ""
    if HERMES.open_tag in template:
        return "hermes"
    return "llama3_json" if LLAMA3_JSON.open_tag in template or '"parameters"' in template else "hermes"
