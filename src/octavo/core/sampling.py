"""SamplingParams: what a caller asks of one request's generation, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError

MAX_SEED = 2**63 - 1
MAX_CHOICES = 256
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings follow vLLM's.

    The logits of a step pass through, in this order: `structured` (masks what would leave the grammar), `logit_bias`,
    `min_tokens` (masks the ids that would end the
    request), the penalties, `temperature`, `min_p`, `top_k`, `top_p`, then one draw. At least one token always
    survives. Log-probabilities are of the model's own distribution, before all of that.

    Args:
        n: Answers to one prompt. Answer i draws with `seed + i`; all share the prompt's blocks.
        temperature: 0 means greedy (the highest logit, ties to the lowest id); otherwise logits are divided by it.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        min_p: Drop tokens less likely than this fraction of the most likely one; 0 drops none.
        seed: Repeats the draw exactly, whatever else runs; `None` draws a seed on arrival.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: Subtracted once from each token in the output; 0 is off.
        frequency_penalty: Subtracted per occurrence in the output; 0 is off.
        logit_bias: Token id to a value added to its logit, -100 to 100.
        min_tokens: Output tokens before anything may end the request (end-of-sequence ids, `stop_token_ids`, `stop`).
        max_tokens: Most output tokens; `None` means up to the length limit. 0 scores the prompt only and needs
            `prompt_logprobs`.
        stop: Strings that end the text; the text is cut before the first, unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the request, also with `ignore_eos`.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        ignore_eos: End-of-sequence ids do not end the request.
        skip_special_tokens: Leave special tokens out of the text.
        logprobs: Most likely tokens reported per output token, beside the chosen one; `None` reports nothing.
        prompt_logprobs: The same for each prompt token. Such a request does not read the prefix cache, but fills it.
        structured: What the text has to be: JSON, a regular expression, one of several texts, or of a grammar. The
            answer then ends by itself ("stop") where the text is complete, or is cut at `max_tokens` ("length").

    Raises:
        InvalidParameterError: naming the field, the value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        # `None` is how other engines spell "nothing" here.
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise InvalidParameterError(f"{getattr(self, name)!r} is neither True nor False", param=name)
        _check_numbers(self)
        _check_stops(self)
        _check_bias(self)
        _check_structured(self)
        # The one place a frozen value is completed: sequences become tuples, so that params are hashable and shared
        # safely. Nothing is changed in meaning.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_numbers(params: SamplingParams) -> None:
    _check_int(params, "n", 1, MAX_CHOICES)
    _check_float(params, "temperature", 0.0, 100.0)
    _check_float(params, "top_p", 0.0, 1.0)
    _check_int(params, "top_k", -1, 2**31 - 1)
    _check_float(params, "min_p", 0.0, 1.0)
    _check_float(params, "presence_penalty", -2.0, 2.0)
    _check_float(params, "frequency_penalty", -2.0, 2.0)
    _check_float(params, "repetition_penalty", 0.01, 100.0)
    if params.seed is not None:
        _check_int(params, "seed", -MAX_SEED - 1, MAX_SEED)
    _check_int(params, "min_tokens", 0, 2**31 - 1)
    if params.max_tokens is not None:
        _check_int(params, "max_tokens", 0, 2**31 - 1)
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise InvalidParameterError(
                "0 output tokens leave nothing to return",
                param="max_tokens",
                hints=("ask for at least 1, or set prompt_logprobs to score the prompt",),
            )
        if params.min_tokens > params.max_tokens:
            raise InvalidParameterError(
                f"{params.min_tokens} is more than max_tokens={params.max_tokens}", param="min_tokens"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(params, name, 0, 1024)


def _check_int(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameterError(f"{value!r} is not a whole number from {low:,} to {high:,}", param=name)


def _check_float(params: SamplingParams, name: str, low: float, high: float) -> None:
    value = getattr(params, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameterError(f"{value!r} is not a number from {low:g} to {high:g}", param=name)


def _check_stops(params: SamplingParams) -> None:
    stops = (params.stop,) if isinstance(params.stop, str) else params.stop
    if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidParameterError(f"{params.stop!r} is not a list of non-empty strings", param="stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidParameterError(f"{len(stops)} strings, at most {MAX_STOP_STRINGS} are looked for", param="stop")
    ids = params.stop_token_ids
    if (
        not isinstance(ids, Sequence)
        or isinstance(ids, str | bytes)
        or not all(type(token) is int and token >= 0 for token in ids)
    ):
        raise InvalidParameterError(f"{ids!r} is not a list of token ids", param="stop_token_ids")


def _check_bias(params: SamplingParams) -> None:
    if not isinstance(params.logit_bias, Mapping):
        raise InvalidParameterError(f"{params.logit_bias!r} is not a map of token ids to numbers", param="logit_bias")
    for token, bias in params.logit_bias.items():
        if type(token) is not int or token < 0:
            raise InvalidParameterError(f"{token!r} is not a token id", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
            raise InvalidParameterError(f"{bias!r} is not a number from -100 to 100", param="logit_bias")


def _check_structured(params: SamplingParams) -> None:
    """Refuse what contradicts a grammar: once its text is complete, nothing but the end may follow."""
    if params.structured is None:
        return
    if not isinstance(params.structured, StructuredOutput):
        raise InvalidParameterError(f"{type(params.structured).__name__} is no StructuredOutput", param="structured")
    for param, value, is_set in (
        ("ignore_eos", True, params.ignore_eos),
        ("min_tokens", params.min_tokens, params.min_tokens > 0),
    ):
        if is_set:
            raise InvalidParameterError(
                f"{value} contradicts structured output",
                param=param,
                because="an answer ends where its grammar is complete: only the end of sequence is allowed there",
                hints=(f"leave {param} out",),
            )
