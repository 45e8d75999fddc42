"""Tools told to a model whose chat template does not know of any."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """\
You can call functions. These are their signatures, one JSON object a line, within <tools>:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON within <tool_call>, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the chat with the tools in its system message, for templates that would drop them.

    Calls of earlier answers are written out as the model would have, and their results named as such.
    """
    told = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    chat = [_as_text(message) for message in messages]
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0].get('content') or ''}\n\n{told}".strip()}, *chat[1:]]
    return [{"role": "system", "content": told}, *chat]


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    parts = [str(message["content"])] if message.get("content") else []
    for call in message["tool_calls"]:
        function = {key: call["function"][key] for key in ("name", "arguments")}
        parts.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}
