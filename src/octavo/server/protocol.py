"""What requests may hold: the fields that completions and chats share, and how fields are read.

Unknown fields are refused by name, `null` means absent, and types are taken strictly: `"1"` is no number. Fields that
clients send but that change nothing here are named in `IGNORED`, fields of others that would change something in
`REFUSED`; `docs/server.md` lists both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from octavo.core.sampling import MAX_CHOICES, MAX_SEED, MAX_STOP_STRINGS
from octavo.errors import InvalidParameterError
from octavo.server.protocol_structured import NullsAbsent, StructuredFields

MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASES = 4096
MAX_SALT_CHARS = 256

IGNORED: Mapping[str, str] = {
    "user": "whose request it is changes nothing",
    "safety_identifier": "whose request it is changes nothing",
    "metadata": "requests are not stored",
    "store": "requests are not stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prompts that begin alike are found without a name",
    "prompt_cache_retention": "cached blocks stay until their memory is needed",
}
"""Fields that are read and change nothing."""

REFUSED: Mapping[str, str] = {
    "best_of": "ask for `n` answers and choose",
    "suffix": "text is not filled in between two others",
    "use_beam_search": "beams are not searched; `n` draws several answers",
    "length_penalty": "beams are not searched",
    "early_stopping": "beams are not searched",
    "functions": "write them as `tools`",
    "function_call": "write it as `tool_choice`",
    "audio": "answers are text",
    "prediction": "there is no speculation from predicted text",
    "web_search_options": "the server reaches nothing outside itself",
    "reasoning_effort": "templates that know it take it from `chat_template_kwargs`",
    "verbosity": "say it in the prompt",
    "moderation": "answers are not moderated",
    "truncate_prompt_tokens": "prompts are never cut; send what shall be read",
    "logits_processors": "code of a request is never run",
    "allowed_token_ids": "use `structured_outputs`, or `logit_bias`",
    "bad_words": "use `logit_bias`",
    "continue_final_message": "send the text as a prompt to /v1/completions",
    "documents": "pass them in `chat_template_kwargs`",
    "chat_template": "templates of a request are not run; the model's own is used",
    "mm_processor_kwargs": "prompts are text",
    "kv_transfer_params": "blocks do not leave this process",
}
"""Known fields of other servers that would change an answer, and what to do instead."""


def _read_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("a non-empty text or a list of them was expected")
    if len(stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"at most {MAX_STOP_STRINGS} texts of at most {MAX_STOP_CHARS:,} characters are looked for")
    if not all(map(_is_text, stops)):
        raise ValueError("half a surrogate pair never comes")
    return tuple(stops)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"an object of at most {MAX_BIASES:,} token ids and numbers was expected")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
            raise ValueError("its keys are token ids, written as whole numbers")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("its values are numbers from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _ignore(_value: Any) -> None:
    return None


Ignored = Annotated[None, PlainValidator(_ignore), WithJsonSchema({"description": "Read, and changes nothing"})]
StopTexts = Annotated[
    tuple[str, ...],
    PlainValidator(_read_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
TokenBiases = Annotated[
    dict[int, float],
    PlainValidator(_read_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class StreamOptions(NullsAbsent):
    """How a stream looks."""

    include_usage: bool = Field(default=False, description="End with a chunk that holds the usage")
    include_obfuscation: Ignored = None


class RequestFields(StructuredFields):
    """Fields of completions and chats. Names and meanings are OpenAI's, and vLLM's where it has more."""

    model: str | None = Field(default=None, description="A name from /v1/models; absent means the one that is served")
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description="Answers to each prompt; they share its blocks")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1, description="0 or -1 keeps all")
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED, description="Answer i draws with seed + i")
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    logit_bias: TokenBiases = Field(default_factory=dict)
    stop: StopTexts = ()
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1)
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(default=None, ge=0, le=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(
        default=0, ge=-(2**31), le=2**31 - 1, description="Lower runs first, under --scheduling-policy priority"
    )
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=MAX_SALT_CHARS, description="Requests with other salts share no blocks"
    )
    user: Ignored = None
    safety_identifier: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name in REFUSED and name not in cls.model_fields and value[name] is not None:
                raise InvalidParameterError("is not supported", param=name, hints=(REFUSED[name],))
        return value

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream(self) -> None:
        """Refuse what has no place in a stream, and stream options without one.

        Raises:
            InvalidParameterError: naming the field.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError("given without stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameterError(
                "scores of the prompt are not streamed", param="prompt_logprobs", hints=("leave out stream",)
            )

    def sampling_fields(self) -> dict[str, Any]:
        """Return what `SamplingParams` takes under the same names."""
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "logit_bias", "stop", "include_stop_str_in_output", "ignore_eos", "min_tokens",
            "skip_special_tokens", "prompt_logprobs",
        )  # fmt: skip
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "stop_token_ids": tuple(self.stop_token_ids), "structured": self.structured()}
