"""What answers look like, for the OpenAPI document. Tests hold every answer against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """An object of an answer."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorBody(Answer):
    """What went wrong, and for whom to say so."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer):
    """Every answer that is none."""

    error: ErrorBody


class PromptTokensDetails(Answer):
    """Tokens of the prompts that were in the prefix cache."""

    cached_tokens: int


class UsageAnswer(Answer):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    """Scores of a completion's tokens; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TopLogprob(Answer):
    """One candidate at one place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenScore(TopLogprob):
    """One token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Scores of an answer's tokens."""

    content: list[TokenScore]
    refusal: None


class FunctionCalled(Answer):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCalled(Answer):
    """A call that the model wants to be made."""

    id: str
    type: Literal["function"]
    function: FunctionCalled


class AssistantMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCalled] | None = None


class ChatChoice(Answer):
    """One message."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ModelCard(Answer):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    """The names of the model."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer):
    """The ids of a text or chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer):
    """The text of ids."""

    prompt: str


class HealthAnswer(Answer):
    """How the server is."""

    status: Literal["ok", "loading", "draining", "stalled", "failed"]


class VersionAnswer(Answer):
    """What runs."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in {
        400: "The request cannot be answered as it is",
        401: "No key, or a wrong one",
        403: "Not from here, or not for you",
        404: "There is no such model or thing",
        408: "The body took too long",
        413: "The body is too large",
        415: "The body is not application/json",
        429: "Too many wait; come back after Retry-After",
        500: "The server failed",
        503: "Loading, draining or failed",
    }.items()
}
"""Answers that every route may give."""
