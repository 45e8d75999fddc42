"""Lengths of requests: how many tokens they bring and get, and what they hold of it on average.

    1155:211               every request has a prompt of 1,155 tokens and gets 211
    500:100x3,8k:500       three in four are short

`trace.py` reads them from a recorded trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from octavo.errors import InvalidParameterError
from octavo.units import parse_count, quote

_CLASS = re.compile(r"([^:x]+):([^:x]+?)(?:x(\d{1,9}))?")
MAX_TOKENS = 2**31 - 1
_EVEN_STRETCH = 64
_MOST_STRETCHES = 1 << 14


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
        if max(prompt, output) > MAX_TOKENS or (match.group(3) and int(match.group(3)) < 1):
            raise _unreadable(text, param)
        classes.append(LengthClass(prompt, output, int(match.group(3) or 1)))
    return Lengths(classes=tuple(classes), source=f"--{param} {text}")


def _unreadable(text: str, param: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"{quote(text)} is no prompt:output length",
        param=param,
        because="it is prompt:output, each of at least 1 token, or several with weights, separated by commas",
        hints=(f"write for example `--{param} 1155:211` or `--{param} 500:100x3,8k:500`",),
    )
