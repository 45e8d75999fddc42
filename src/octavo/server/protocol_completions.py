"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from octavo.core.sampling import SamplingParams
from octavo.errors import InvalidParameterError
from octavo.server.protocol import RequestFields

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default of this endpoint."""

Prompts = tuple[str | tuple[int, ...], ...]


def _read_prompts(value: Any) -> Prompts:
    """Read a text, ids, or a list of either."""
    if isinstance(value, str) or is_ids(value):
        return (value if isinstance(value, str) else tuple(value),)
    if not isinstance(value, list) or not value:
        raise ValueError("a text, a list of token ids, or a list of either was expected")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value):,} prompts, at most {MAX_PROMPTS} are taken")
    if not all(isinstance(each, str) or is_ids(each) for each in value):
        raise ValueError("a text, a list of token ids, or a list of either was expected")
    return tuple(each if isinstance(each, str) else tuple(each) for each in value)


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of at least one whole number."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


PromptField = Annotated[
    Prompts,
    PlainValidator(_read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    ),
]


class CompletionRequest(RequestFields):
    """Prompts to continue."""

    prompt: PromptField
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=0, le=2**31 - 1, description="0 scores the prompt")
    echo: bool = Field(default=False, description="Begin each answer with its prompt, and its log-probabilities")
    logprobs: int | None = Field(default=None, ge=0, le=1024, description="Most likely tokens reported per token")
    add_special_tokens: bool = Field(default=True, description="Put what the model wants (often BOS) around a text")

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of one prompt.

        Raises:
            InvalidParameterError: a value is not allowed.
        """
        self.check_stream()
        fields = self.sampling_fields()
        if self.echo and fields["prompt_logprobs"] is None:
            # Without log-probabilities nothing of the prompt's scores is shown, but an answer of 0 tokens needs some.
            fields["prompt_logprobs"] = self.logprobs if self.max_tokens else self.logprobs or 0
        elif self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(fields["prompt_logprobs"], self.logprobs)
        if self.max_tokens == 0 and fields["prompt_logprobs"] is None:
            raise InvalidParameterError(
                "0 output tokens leave nothing to return",
                param="max_tokens",
                hints=("ask for at least 1, or for echo with logprobs to score the prompt",),
            )
        return SamplingParams(**fields, max_tokens=self.max_tokens, logprobs=self.logprobs)
