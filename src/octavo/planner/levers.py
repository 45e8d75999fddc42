"""Levers: what each change would do to the number of requests that fit, counted by the same code as the plan itself.

Changes of options can be made; the others show what the model's own attention saves, against the same model with
full heads, with a single KV head, or with a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import CapacityError, InvalidParameterError
from octavo.planner.advice import rank_options, with_options
from octavo.planner.lengths import Lengths
from octavo.planner.question import PlanQuestion
from octavo.planner.sizer import Sizer, ranks
from octavo.planner.sizing import Sizing
from octavo.planner.subject import AS_IS, Hypothesis

_DTYPES = ("f16", "bf16", "fp8", "int8", "int4")
_WINDOW_TOKENS = 4096
_PREFIX_TOKENS = 1024
_MAX_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change and what it does.

    Args:
        name: What is changed, in words.
        options: The options that make it so, as flags; empty for what cannot be changed in a finished model.
        max_concurrency: Requests of `max_model_len` tokens at once.
        concurrency_at_lengths: Requests of the asked lengths at once; `None` when none were asked.
        gain_ratio: `max_concurrency` against the plan's own.
    """

    name: str
    options: str
    kv_bytes_per_token: int
    pool_tokens: int
    max_model_len: int
    max_concurrency: float
    concurrency_at_lengths: float | None
    gain_ratio: float

    @property
    def is_hypothetical(self) -> bool:
        return not self.options

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "options": self.options,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "pool_tokens": self.pool_tokens,
            "max_model_len": self.max_model_len,
            "max_concurrency": self.max_concurrency,
            "concurrency_at_lengths": self.concurrency_at_lengths,
            "gain_ratio": self.gain_ratio,
        }


_MAX_DOUBLINGS = 3
"""Of the seats in a step; more would be another plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    name: str
    question: PlanQuestion
    options: str = ""
    hypothesis: Hypothesis = AS_IS
    num_tokens: int | None = None
    shared_tokens: int = 0


def find_levers(sizer: Sizer, question: PlanQuestion, base: Sizing, lengths: Lengths | None) -> tuple[Lever, ...]:
    """Return what each change would do; those that the engine or the model does not take are left out."""
    levers = []
    for plain in _changes(sizer, question, base, lengths):
        try:
            change, sizing = _seated(sizer, plain, sizer.size(plain.question, plain.hypothesis))
        except (InvalidParameterError, CapacityError):
            continue
        levers.append(_lever(change, sizing, base, lengths, question.shared_prefix or 0))
    return tuple(levers)


def _seated(sizer: Sizer, change: _Change, sizing: Sizing) -> tuple[_Change, Sizing]:
    """Add the seats that a change needs to be of use: Octavo's own pools are no larger than all seats can fill."""
    if sizing.engine != "octavo" or not change.options or change.question.max_num_seqs is not None:
        return change, sizing
    plain = change
    num_tokens = change.num_tokens or sizing.max_model_len or sizing.length_limit
    for _ in range(_MAX_DOUBLINGS):
        num_seats = sizing.max_num_seqs
        if sizing.concurrency_of(num_tokens) < num_seats:
            break
        try:
            question = replace(plain.question, max_num_seqs=2 * num_seats)
            sizing = sizer.size(question, plain.hypothesis)
        except (InvalidParameterError, CapacityError):
            break
        change = replace(plain, question=question, options=f"{plain.options} --max-num-seqs {2 * num_seats}")
    return change, sizing


def _lever(change: _Change, sizing: Sizing, base: Sizing, lengths: Lengths | None, asked_prefix: int) -> Lever:
    num_tokens = change.num_tokens or base.max_model_len or base.length_limit
    shared = change.shared_tokens
    concurrency = sizing.concurrency_of(num_tokens, shared_tokens=shared)
    if sizing.is_reserved:
        concurrency = float(sizing.num_blocks // sizing.kv.blocks_reserved(num_tokens))
    own = base.max_concurrency
    fitting = lengths.up_to(num_tokens) if lengths else None
    return Lever(
        name=change.name,
        options=change.options,
        kv_bytes_per_token=sizing.kv.token_bytes,
        pool_tokens=sizing.pool_tokens,
        max_model_len=num_tokens,
        max_concurrency=concurrency,
        concurrency_at_lengths=(
            sizing.concurrency_at(fitting, shared_tokens=shared or asked_prefix) if fitting else None
        ),
        gain_ratio=concurrency / own if own else 0.0,
    )


def _changes(sizer: Sizer, question: PlanQuestion, base: Sizing, lengths: Lengths | None) -> Iterator[_Change]:
    yield from _dtypes(question, base)
    length = base.max_model_len or base.length_limit
    shorter = length // 4
    if length >= 2048 and shorter > (question.shared_prefix or 0):
        yield _Change(
            name=f"requests of {shorter:,} tokens",
            question=replace(question, max_model_len=shorter, is_length_auto=False),
            options=f"--max-model-len {shorter}",
            num_tokens=shorter,
        )
    if base.is_caching:
        longest = max(each.num_prompt_tokens for each in lengths.classes) if lengths else length
        prefix = question.shared_prefix or min(_PREFIX_TOKENS, length // 2, longest)
        yield _Change(
            name=f"{prefix:,} tokens shared by all",
            question=question,
            options=f"--shared-prefix {prefix}",
            shared_tokens=prefix,
        )
    if base.engine != "octavo":
        yield from _more_devices(question)
    yield from _other_attention(sizer, question, base)


def _dtypes(question: PlanQuestion, base: Sizing) -> Iterator[_Change]:
    for dtype in _DTYPES:
        is_same_size = {dtype, base.kv_dtype} == {"f16", "bf16"}
        if base.kv_dtype.startswith(dtype) or is_same_size:  # fp8 is fp8_e4m3
            continue
        try:
            changed = replace(question, kv_cache_dtype=dtype)
        except InvalidParameterError:
            continue
        yield _Change(name=f"KV cache as {dtype}", question=changed, options=f"--kv-cache-dtype {dtype}")


def _more_devices(question: PlanQuestion) -> Iterator[_Change]:
    tensor, stages = ranks(question)
    for more in (2 * tensor, 4 * tensor):
        if more * stages > _MAX_RANKS:
            return
        changed = with_options(question, rank_options(question, more, stages))
        yield _Change(
            name=f"{more * stages} devices in parallel",
            question=changed,
            options=" ".join(
                f"--{name.replace('_', '-')} {value}" for name, value in rank_options(question, more, stages).items()
            ),
        )


def _other_attention(sizer: Sizer, question: PlanQuestion, base: Sizing) -> Iterator[_Change]:
    shape = sizer.subject.shape
    heads = {layer.kv.num_kv_heads for layer in shape.layers if layer.kv and layer.kv.kind != "latent"}
    kinds = {layer.kv.kind for layer in shape.layers if layer.kv}
    length = base.max_model_len or base.length_limit
    if "full" in kinds and length > 2 * _WINDOW_TOKENS:
        yield _Change(
            name=f"a window of {_WINDOW_TOKENS:,} in every layer",
            question=question,
            hypothesis=Hypothesis(window=_WINDOW_TOKENS),
        )
    if heads and max(heads) < shape.num_heads:
        yield _Change(
            name=f"all {shape.num_heads} heads with own keys and values",
            question=question,
            hypothesis=Hypothesis(num_kv_heads=shape.num_heads),
        )
    if heads and max(heads) > 1:
        yield _Change(name="one key-value head for all heads", question=question, hypothesis=Hypothesis(num_kv_heads=1))
