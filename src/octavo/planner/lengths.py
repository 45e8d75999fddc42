"""Lengths of requests: how many tokens they bring and get, asked as words or read from a trace.

    1155:211               every request has a prompt of 1,155 tokens and gets 211
    500:100x3,8k:500       three in four are short

A trace is a CSV file or JSON lines; only its two length columns are looked at (`_NAMES`), so the published traces of
Azure, Mooncake, Vidur and LLMServingSim are read as they are, and so is a workload of prompts as token ids.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from octavo.config.text_file import read_text_file
from octavo.errors import InvalidParameterError
from octavo.units import MIB, parse_count, quote

_CLASS = re.compile(r"([^:x]+):([^:x]+?)(?:x(\d{1,9}))?")
_MAX_TOKENS = 2**31 - 1
MAX_TRACE_BYTES = 256 * MIB
_EVEN_STRETCH = 64
_MOST_STRETCHES = 1 << 14

# Columns of published traces, in pairs: tokens of the prompt, tokens of the answer.
_NAMES = (
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("input_toks", "output_toks"),
    ("prompt_tokens", "output_tokens"),
    ("num_prompt_tokens", "num_output_tokens"),
    ("prompt_tokens", "completion_tokens"),
)


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Requests of one length.

    Args:
        weight: How many of them there are, against the other classes.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    weight: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of lengths.

    Args:
        classes: At least one.
        source: Where it comes from, for a person.
    """

    classes: tuple[LengthClass, ...]
    source: str

    @cached_property
    def num_requests(self) -> int:
        return sum(each.weight for each in self.classes)

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(each.weight * each.num_prompt_tokens for each in self.classes) / self.num_requests

    @cached_property
    def mean_output_tokens(self) -> float:
        return sum(each.weight * each.num_output_tokens for each in self.classes) / self.num_requests

    def quantile_tokens(self, share: float) -> int:
        """Return the whole length (prompt and output) that `share` of the requests do not exceed."""
        rank = share * self.num_requests
        seen = 0
        for each in sorted(self.classes, key=lambda one: one.num_tokens):
            seen += each.weight
            if seen >= rank:
                return each.num_tokens
        return max(each.num_tokens for each in self.classes)

    def up_to(self, max_model_len: int) -> Lengths | None:
        """Return those requests that a limit lets in; `None` when it lets in none."""
        kept = tuple(each for each in self.classes if each.num_tokens <= max_model_len)
        if len(kept) == len(self.classes):
            return self  # with the sums that it has made
        return Lengths(classes=kept, source=self.source) if kept else None

    def mean_held(self, held: Callable[[int], float], *, step: int) -> float:
        """Return what a running request holds on average, in the unit of `held`.

        A request of p prompt and o output tokens holds `held(p + 1)`, `held(p + 2)` ... `held(p + o)` in its o decode
        steps; at a random moment a running request is in any of its steps alike, so long answers count for longer.

        Args:
            held: What a request of n tokens holds; it changes only where n passes a multiple of `step`, or evenly with
                every token if that is 1.
        """
        sums = _StepSums(held, step, longest=max(self._weights_by_end))
        total = sum(weight * sums.up_to(num_tokens) for num_tokens, weight in self._weights_by_end.items())
        return total / sum(each.weight * each.num_output_tokens for each in self.classes)

    @cached_property
    def _weights_by_end(self) -> Mapping[int, int]:
        """How often a sum of steps ends at so many tokens, less how often one begins there.

        A long trace has as many classes as requests, and far fewer lengths.
        """
        weights: dict[int, int] = {}
        for each in self.classes:
            weights[each.num_tokens] = weights.get(each.num_tokens, 0) + each.weight
            weights[each.num_prompt_tokens] = weights.get(each.num_prompt_tokens, 0) - each.weight
        return weights


class _StepSums:
    """Sums of `held(1) ... held(n)` in constant time each, by whole stretches of tokens.

    Where every token counts by itself (a step of 1), what is held grows evenly, and a stretch is as its middle. So is
    one of many steps, which bounds the work for a length that somebody made up.
    """

    def __init__(self, held: Callable[[int], float], step: int, *, longest: int) -> None:
        self._held = held
        most = -(-longest // _MOST_STRETCHES)
        self._is_even = step == 1 or step < most
        self._stretch = max(_EVEN_STRETCH, most) if self._is_even else step
        self._sums = [0.0]

    def up_to(self, num_tokens: int) -> float:
        whole, rest = divmod(num_tokens, self._stretch)
        while len(self._sums) <= whole:
            self._sums.append(self._sums[-1] + self._sum_of(len(self._sums) - 1, self._stretch))
        return self._sums[whole] + self._sum_of(whole, rest)

    def _sum_of(self, stretch: int, num_tokens: int) -> float:
        """Return the sum over the first tokens of a stretch."""
        begin = stretch * self._stretch
        if self._is_even and num_tokens:
            return num_tokens * (self._held(begin + 1) + self._held(begin + num_tokens)) / 2
        return num_tokens * self._held(begin + self._stretch) if num_tokens else 0.0


def parse_lengths(text: str, *, param: str = "lengths") -> Lengths:
    """Read `1155:211` or `500:100x3,8k:500`.

    Raises:
        InvalidParameterError: it is neither.
    """
    classes = []
    for part in text.split(","):
        match = _CLASS.fullmatch(part.strip().lower())
        if match is None:
            raise _unreadable(text, param)
        try:
            prompt, output = (parse_count(match.group(number), param=param) for number in (1, 2))
        except InvalidParameterError as error:
            raise _unreadable(text, param) from error
        if max(prompt, output) > _MAX_TOKENS or (match.group(3) and int(match.group(3)) < 1):
            raise _unreadable(text, param)
        classes.append(LengthClass(prompt, output, int(match.group(3) or 1)))
    return Lengths(classes=tuple(classes), source=f"--{param} {text}")


def read_trace(path: Path, *, param: str = "trace") -> Lengths:
    """Read the lengths of a trace.

    Raises:
        InvalidParameterError: no lengths in it, or more than is read.
        MachineError: it cannot be read.
    """
    text = read_text_file(
        path,
        param=param,
        what="a trace",
        max_bytes=MAX_TRACE_BYTES,
        encoding="utf-8-sig",
        hints=(f"give a part of it, as `head -n 100000 {path} > part{path.suffix}`",),
    )
    try:
        pairs = list(_pairs(text, path, param))
    except csv.Error as error:
        raise InvalidParameterError(f"{path} is neither CSV nor JSON lines: {error}", param=param) from error
    counted: dict[tuple[int, int], int] = {}
    for pair in pairs:
        counted[pair] = counted.get(pair, 0) + 1
    # A request without a generated token holds nothing between two steps.
    classes = tuple(LengthClass(*pair, weight) for pair, weight in counted.items() if pair[1] >= 1)
    if not classes:
        raise InvalidParameterError(f"{path} holds no request with an output token", param=param)
    return Lengths(classes=classes, source=f"{len(pairs):,} requests of {path.name}")


def _unreadable(text: str, param: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"{quote(text)} is no prompt:output length",
        param=param,
        because="it is prompt:output, each of at least 1 token, or several with weights, separated by commas",
        hints=(f"write for example `--{param} 1155:211` or `--{param} 500:100x3,8k:500`",),
    )


def _pairs(text: str, path: Path, param: str) -> Iterator[tuple[int, int]]:
    for number, row in enumerate(_rows(text, path, param), start=1):
        found = _lengths_of(row)
        if found is None:
            raise InvalidParameterError(
                f"{path}: entry {number:,} has no lengths",
                param=param,
                because="known columns are " + ", ".join(f"{a} and {b}" for a, b in _NAMES),
            )
        yield found


def _rows(text: str, path: Path, param: str) -> Iterable[Mapping[str, Any]]:
    start = text.lstrip()[:1]
    if start not in {"{", "["}:
        return csv.DictReader(text.splitlines())
    try:
        whole = json.loads(text) if start == "[" else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(f"{path} is neither CSV nor JSON lines: {error}", param=param) from error
    return [row for row in whole if isinstance(row, dict)]


def _lengths_of(row: Mapping[str, Any]) -> tuple[int, int] | None:
    if isinstance(row.get("prompt_token_ids"), list):
        output = _whole(row.get("max_tokens"))
        return None if output is None else (len(row["prompt_token_ids"]), output)
    for prompt_name, output_name in _NAMES:
        prompt, output = _whole(row.get(prompt_name)), _whole(row.get(output_name))
        if prompt is not None and output is not None:
            return prompt, output
    return None


def _whole(value: object) -> int | None:
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    is_whole = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= _MAX_TOKENS
    return number if is_whole else None  # type: ignore[return-value]  # narrowed by is_whole
