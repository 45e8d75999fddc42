"""Sampling options on the command line, one for each field of `SamplingParams` but the seed.

`--seed` is an engine option already; a command that samples lets every prompt draw with it.

@sampling_options(max_tokens=256)
def command(params: SamplingParams, ...) -> None: ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from octavo.cli.options import Command, GroupedOption
from octavo.config.text_file import read_text_file
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.errors import InvalidParameterError
from octavo.units import MIB

MAX_SCHEMA_BYTES = MIB


def sampling_options(*, max_tokens: int) -> Callable[[Command], Command]:
    """Add the sampling options; the command receives a checked `params`.

    Args:
        max_tokens: The command's own default. On a terminal an answer without end is no help.
    """

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            given = {name: values.pop(name) for name in _NAMES}
            given["logit_bias"] = _read_biases(given["logit_bias"])
            given["stop_token_ids"] = list(given["stop_token_ids"])
            given["stop"] = list(given["stop"])
            given["structured"] = _read_structured(**{name: values.pop(name) for name in _STRUCTURES})
            return function(params=SamplingParams(**given), **values)

        for option in reversed(_options(max_tokens)):
            wrapper = option(wrapper)
        return wrapper

    return decorate


def _options(max_tokens: int) -> list[Command]:
    def add(*spelling: str, **attributes: Any) -> Command:
        return click.option(*spelling, cls=GroupedOption, group="Sampling", **attributes)

    return [
        add("-n", "n", type=int, default=1, metavar="N", help="Answers to each prompt; they share its blocks  [1]"),
        add("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"Most output tokens  [{max_tokens}]"),
        add("--min-tokens", type=int, default=0, metavar="N", help="Output tokens before anything may end it  [0]"),
        add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy; higher is more random  [0]"),
        add("--top-p", type=float, default=1.0, metavar="P", help="Keep the likeliest tokens up to this sum  [1]"),
        add("--top-k", type=int, default=0, metavar="K", help="Keep this many likeliest tokens; 0 keeps all  [0]"),
        add("--min-p", type=float, default=0.0, metavar="P", help="Drop tokens below P x the likeliest  [0]"),
        add("--repetition-penalty", type=float, default=1.0, metavar="X", help="Above 1 discourages repeating  [1]"),
        add("--presence-penalty", type=float, default=0.0, metavar="X", help="Per token already in the output  [0]"),
        add("--frequency-penalty", type=float, default=0.0, metavar="X", help="Per occurrence in the output  [0]"),
        add("--logit-bias", multiple=True, metavar="ID:X", help="Add X to a token's logit; repeatable"),
        add("--stop", multiple=True, metavar="TEXT", help="End the text before TEXT; repeatable"),
        add("--stop-token-ids", type=int, multiple=True, metavar="ID", help="End at a token id; repeatable"),
        add("--include-stop-str-in-output", is_flag=True, help="Keep the stop text at the end"),
        add("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token"),
        add("--logprobs", type=int, metavar="K", help="Report K likeliest tokens per output token, in --json"),
        add("--json-schema", metavar="FILE", help="Answer in this JSON"),
        add("--regex", metavar="EXPR", help="Answer in a text that all of EXPR matches"),
        add("--choice", multiple=True, metavar="TEXT", help="Answer in one of several texts; repeatable"),
        add("--prompt-logprobs", type=int, metavar="K", help="The same for prompt tokens, in --json"),
    ]


_NAMES = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


_STRUCTURES = ("json_schema", "regex", "choice")


def _read_structured(*, json_schema: str | None, regex: str | None, choice: tuple[str, ...]) -> StructuredOutput | None:
    given = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidParameterError(f"given together with {named[1]}", param=named[0], hints=("give one",))
    if json_schema is not None:
        schema = read_text_file(
            Path(json_schema), param="--json-schema", what="a JSON schema", max_bytes=MAX_SCHEMA_BYTES
        )
        return StructuredOutput.of_json_schema(schema)
    if regex is not None:
        return StructuredOutput(kind="regex", value=regex)
    return StructuredOutput.of_choice(choice) if choice else None


def _read_biases(given: tuple[str, ...]) -> dict[int, float]:
    biases = {}
    for text in given:
        token_id, _, bias = text.partition(":")
        try:
            key = int(token_id)
            if key in biases:
                raise InvalidParameterError(f"token {key} is given twice", param="--logit-bias")
            biases[key] = float(bias)
        except ValueError:
            raise InvalidParameterError(
                f"{text!r} is not a token id, a colon and a number",
                param="--logit-bias",
                hints=("write for example `--logit-bias 42:-5`",),
            ) from None
    return biases
