"""What the text of an answer has to be when a call is required: the grammar of calls in a format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError
from octavo.server.tool_parsers.formats import call_format

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    format_name: str, tools: Sequence[Mapping[str, Any]], *, named: str | None = None, is_parallel: bool = True
) -> StructuredOutput:
    """Return the grammar of one call or more.

    Args:
        tools: OpenAI's `{"type": "function", "function": {"name", "parameters"}}`.
        named: The one function to call, once; `None` lets the model choose.
        is_parallel: There may be several calls, one after the other.

    Raises:
        InvalidParameterError: no such function, or parameters that are no object.
    """
    form = call_format(format_name)
    functions = [tool["function"] for tool in tools]
    if named is not None:
        functions = [function for function in functions if function["name"] == named]
        if not functions:
            raise InvalidParameterError(f"{named!r} is not among the tools", param="tool_choice")
    if not functions:
        raise InvalidParameterError("a call is required, but there are no tools", param="tool_choice")
    # A tag that is one special token of the model is no text: a call that may stand without it is written bare.
    opening, closing = ("", "") if form.takes_bare else (f"{form.open_tag}\n", f"\n{form.close_tag}")
    between = f"{form.separator} " if form.separator else "\n"
    rules = [f"call: {_text(opening)} ({' | '.join(f'call_{i}' for i in range(len(functions)))}) {_text(closing)}"]
    rules.append("start: call" + (f" ({_text(between)} call)*" if is_parallel and named is None else ""))
    for i, function in enumerate(functions):
        name, key = json.dumps(function["name"]), json.dumps(form.argument_keys[0])
        before = f'{{"name": {name}, {key}: '
        rules.append(f"call_{i}: {_text(before)} arguments_{i} {_text('}')}")
        rules.append(f"arguments_{i}: %json {json.dumps(_parameters(function))}")
    return StructuredOutput(kind="grammar", value="\n".join(rules) + "\n")


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a function's arguments. It stays a document of its own, so its `$ref`s still point right."""
    parameters = function.get("parameters")
    if not parameters:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidParameterError(
            f"the parameters of {function['name']} are not a schema of an object", param="tools"
        )
    return {"type": "object", **parameters}


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
