"""The bodies of `POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from octavo.errors import InvalidParameterError
from octavo.server.protocol_chat import MAX_MESSAGES, ChatMessage, TemplateVariables, Tool
from octavo.server.protocol_completions import is_ids
from octavo.server.protocol_structured import NullsAbsent

MAX_IDS = 2**20


def _read_ids(value: Any) -> list[int]:
    # Not pydantic's own list: it holds the interpreter's lock for as long as it reads.
    if value != [] and not is_ids(value):
        raise ValueError("a list of token ids was expected")
    if len(value) > MAX_IDS:
        raise ValueError(f"{len(value):,} token ids, at most {MAX_IDS:,} are spelled at a time")
    return list(value)


TokenIds = Annotated[
    list[int], PlainValidator(_read_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
]


class TokenizeRequest(NullsAbsent):
    """A text, or a chat, whose token ids are wanted."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] = Field(default_factory=list, max_length=128, fail_fast=True)
    add_special_tokens: bool | None = Field(default=None, description="Absent means true for a text, false for a chat")
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    def check(self) -> None:
        """Refuse both and neither.

        Raises:
            InvalidParameterError: naming `prompt`.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError("give either prompt or messages", param="prompt")


class DetokenizeRequest(NullsAbsent):
    """Token ids whose text is wanted."""

    model: str | None = None
    tokens: TokenIds
