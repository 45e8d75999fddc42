"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError
from octavo.server.protocol import Ignored, RequestFields
from octavo.server.protocol_structured import NullsAbsent

MAX_MESSAGES = 10_000
MAX_TOP_LOGPROBS = 20
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
_OTHER_PARTS = {
    "image_url": "images", "input_image": "images", "image": "images", "input_audio": "sound", "audio_url": "sound",
    "video_url": "videos", "file": "files",
}  # fmt: skip


def _read_content(value: Any) -> str:
    """Read a text, or a list of text parts, which are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("a text or a list of text parts was expected")  # noqa: TRY004 - pydantic wants it
    texts = []
    for part in value:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if kind in _OTHER_PARTS:
            raise ValueError(f"{_OTHER_PARTS[kind]} ({kind}) are not taken: the model reads text only")
        if kind not in _TEXT_PARTS or set(part) != {"type", _TEXT_PARTS[kind]}:
            raise ValueError('a part is {"type": "text", "text": "..."}')
        if not isinstance(part[_TEXT_PARTS[kind]], str):
            raise ValueError("the text of a part is no text")  # noqa: TRY004
        texts.append(part[_TEXT_PARTS[kind]])
    return "".join(texts)


def _read_variables(value: Any) -> dict[str, Any]:
    """Read more variables for the template; those that the server sets itself cannot be set again."""
    if not isinstance(value, dict):
        raise ValueError("an object was expected")  # noqa: TRY004 - pydantic wants it
    for name in value:
        if name in _OWN_VARIABLES:
            raise ValueError(f"{name} is {_OWN_VARIABLES[name]}")
    return value


_MODELS_OWN = "the model's own, and cannot be another"
_OWN_VARIABLES = {
    "messages": "a field of its own",
    "tools": "a field of its own",
    "add_generation_prompt": "a field of its own",
    "chat_template": "not taken: the model's own template is used",
    "tokenize": "not taken: a chat is always read as tokens",
    "raise_exception": "a function of the template",
    "strftime_now": "a function of the template",
    **{f"{kind}_token": _MODELS_OWN for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    "additional_special_tokens": _MODELS_OWN,
}
TemplateVariables = Annotated[
    dict[str, Any],
    PlainValidator(_read_variables),
    WithJsonSchema({"type": "object", "additionalProperties": True, "description": "More variables for the template"}),
]
Content = Annotated[
    str,
    PlainValidator(_read_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]


class CalledFunction(NullsAbsent):
    """A function that the model called, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(NullsAbsent):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(NullsAbsent):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, fail_fast=True)
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Ignored = None

    def for_template(self, where: str, *, knows_developer: bool) -> dict[str, Any]:
        """Return the message as chat templates read it.

        Raises:
            InvalidParameterError: nothing is said in it.
        """
        if self.content is None and not self.tool_calls:
            raise InvalidParameterError("there is no content", param=f"{where}.content")
        is_system = self.role == "developer" and not knows_developer
        message: dict[str, Any] = {"role": "system" if is_system else self.role, "content": self.content or ""}
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Templates were written for arguments as an object; OpenAI's clients send them as text."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = call.function.arguments
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


class ToolFunction(NullsAbsent):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(NullsAbsent):
    """A tool that the model may use."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(NullsAbsent):
    """The name of a function."""

    name: str


class NamedTool(NullsAbsent):
    """A tool that the model has to use."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(RequestFields):
    """A conversation to go on with."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Absent means up to the length limit")
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1, description="The same as max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    modalities: list[Literal["text"]] | None = Field(default=None, fail_fast=True)
    tools: list[Tool] = Field(default_factory=list, max_length=128, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    def sampling_params(self, required: StructuredOutput | None = None) -> SamplingParams:
        """Return the parameters of the chat's answers.

        Args:
            required: What the text has to be because a call of a tool is required.

        Raises:
            InvalidParameterError: a value is not allowed, or two contradict each other.
        """
        self.check_stream()
        limits = {each for each in (self.max_tokens, self.max_completion_tokens) if each is not None}
        if len(limits) > 1:
            raise InvalidParameterError("given with another value of max_completion_tokens", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameterError("given without logprobs=true", param="top_logprobs")
        fields = self.sampling_fields()
        if required is not None:
            fields["structured"] = required
        return SamplingParams(
            **fields,
            max_tokens=next(iter(limits), None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
