"""Advice: what would make it fit, and what to beware of where it does. Every change named here was tried and fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from octavo.errors import CapacityError, InvalidParameterError
from octavo.planner.capacity import DEFAULT_UTILIZATION
from octavo.planner.lengths import Lengths
from octavo.planner.pool import usable_blocks
from octavo.planner.question import PlanQuestion
from octavo.planner.sizer import Sizer, device_of, ranks
from octavo.planner.sizing import Sizing
from octavo.units import GIB, MIB, format_bytes, format_concurrency

AdviceKind = Literal["change", "warning", "note"]

_NO_SPEED = "how many requests keep the asked latency is not known, since the device's speed is not: "
_MEASURE = "measure it with `octavo bench kernels --json > speed.json`, and add `--calibrate speed.json`"
_NAME_IT = "name it with `--device`, as `--list-devices` spells it"
_MAX_CHANGES = 6
_MAX_RANKS = 16
_MOST_UTILIZATION = 0.97
_LITTLE_BYTES = GIB // 2
_LITTLE_CONCURRENCY = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One piece of advice.

    Args:
        kind: A `change` makes a plan fit that does not.
        text: One sentence.
        options: The options to change, by name, with values as a person writes them.
    """

    kind: AdviceKind
    text: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def flags(self) -> str:
        return as_flags(self.options)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "options": dict(self.options)}


def find_advice(
    sizer: Sizer, question: PlanQuestion, base: Sizing, lengths: Lengths | None, *, has_speed: bool
) -> tuple[Advice, ...]:
    """Return changes that make it fit, nearest first, or warnings about a plan that fits.

    Args:
        has_speed: The device's speed is known, so a latency could be looked at.
    """
    advice = list(_warnings(question, base)) if base.fits else list(_changes_that_fit(sizer, question, base))
    advice += _about_lengths(base, lengths)
    if question.itl is not None and not has_speed:
        advice.append(Advice(kind="note", text=_NO_SPEED + (_MEASURE if base.engine == "octavo" else _NAME_IT)))
    advice += [Advice(kind="note", text=note) for note in base.notes]
    return tuple(advice)


def _changes_that_fit(sizer: Sizer, question: PlanQuestion, base: Sizing) -> Iterator[Advice]:
    yield Advice(kind="warning", text=_what_is_missing(base))
    found = 0
    singles = list(_candidates(question, base))
    for options in chain(singles, (_with_a_shorter_length(sizer, question, each) for each in singles)):
        if found and options not in singles:
            return  # two changes at once are only worth a line where no single one helps
        fitting = _tried(sizer, question, options) if options else None
        if fitting is None:
            continue
        change = Advice(kind="change", text="", options=options)
        held = format_concurrency(fitting.max_concurrency)
        text = f"`{change.flags}` fits: {held} requests of {fitting.max_model_len:,} tokens"
        yield replace(change, text=text)
        found += 1
        if found == _MAX_CHANGES:
            return
    if not found:
        yield Advice(kind="warning", text="no change that was tried makes it fit: take a smaller model, or more memory")


def _what_is_missing(base: Sizing) -> str:
    spent = _spent(base)
    if spent >= base.usable_bytes:
        return (
            f"does not fit by {_gib(spent - base.usable_bytes)}: weights, activations and overhead take {_gib(spent)},"
            f" {_gib(base.usable_bytes)} may be used, and there is no KV cache yet"
        )
    if base.refusal is not None and (not base.num_blocks or base.longest_fitting_len >= base.length_limit):
        return f"does not fit: {base.refusal.message}"
    needed = base.kv.blocks_for(base.length_limit) * base.kv.block_bytes
    missing = max(0, needed - base.num_blocks * base.kv.block_bytes)
    return (
        f"does not fit by {_gib(missing)}: one request of {base.length_limit:,} tokens takes {_gib(needed)} of KV"
        f" cache, the pool has {_gib(base.num_blocks * base.kv.block_bytes)}"
    )


def _candidates(question: PlanQuestion, base: Sizing) -> Iterator[dict[str, str]]:
    """Return changes that may help, the least intrusive first."""
    if base.refusal is not None:
        yield from _smaller_pool(question, base)
    if base.longest_fitting_len >= 1:
        yield {"max_model_len": str(base.safe_length or base.longest_fitting_len)}
    if base.engine == "octavo":
        yield from _more_memory(question, base)
    yield from _more_utilization(question, base)
    for dtype in ("fp8", "int8", "int4"):
        if question.kv_cache_dtype != dtype:
            yield {"kv_cache_dtype": dtype}
    for most in (2048, 512):
        if base.max_num_batched_tokens > most:
            yield {"max_num_seqs": str(min(base.max_num_seqs, 64)), "max_num_batched_tokens": str(most)}
    for dtype in ("fp8", "int8", "int4"):
        if question.weight_dtype != dtype:
            yield {"weight_dtype": dtype}
    if base.engine != "octavo":
        tensor, stages = ranks(question)
        more = 2 * tensor
        while more * stages <= _MAX_RANKS:
            yield rank_options(question, more, stages)
            more *= 2


def _smaller_pool(question: PlanQuestion, base: Sizing) -> Iterator[dict[str, str]]:
    """Return the most that a pool of an asked size can have."""
    room = base.usable_bytes - _spent(base)
    if base.engine != "octavo":
        room = base.pool.low_bytes
    if question.num_blocks is not None and room // base.kv.block_bytes > 1:
        yield {"num_blocks": str(min(question.num_blocks, usable_blocks(room, base.kv.block_bytes)))}
    elif question.kv_cache_memory is not None and room >= MIB:
        yield {"kv_cache_memory": f"{min(question.kv_cache_memory, room) // MIB}MiB"}


def _more_memory(question: PlanQuestion, base: Sizing) -> Iterator[dict[str, str]]:
    """Return the least memory that holds one request of the asked length, by the option that was asked."""
    blocks = base.kv.blocks_for(base.length_limit)
    pool = (blocks + 1) * base.kv.block_bytes
    if question.num_blocks is not None:
        yield {"num_blocks": str(blocks)}
        pool = (question.num_blocks + 1) * base.kv.block_bytes
    elif question.memory is None or question.kv_cache_memory is not None:
        yield {"kv_cache_memory": f"{-(-pool // MIB)}MiB"}
        pool = question.kv_cache_memory or pool
    least = int((_spent(base) + pool) / (question.utilization or DEFAULT_UTILIZATION)) // MIB + 1
    # Without a device, this machine is meant, and it has no more than it has.
    if question.memory is not None or question.device is not None or least * MIB <= base.memory_bytes:
        yield {"memory": f"{least}MiB"}


def _spent(base: Sizing) -> int:
    return base.weights.value_bytes + base.activation.value_bytes + base.overhead.value_bytes


def _more_utilization(question: PlanQuestion, base: Sizing) -> Iterator[dict[str, str]]:
    if not base.memory_bytes or question.kv_cache_memory is not None or question.num_blocks is not None:
        return
    now = base.usable_bytes / base.memory_bytes
    for share in (0.92, 0.95, _MOST_UTILIZATION):
        if share > now + 0.005:
            yield {"utilization": f"{share:g}"}


def _with_a_shorter_length(sizer: Sizer, question: PlanQuestion, options: dict[str, str]) -> dict[str, str]:
    """Return a change together with the longest length that fits under it; empty where none does."""
    if "max_model_len" in options:
        return {}
    try:
        sizing = sizer.size(with_options(question, {**options, "max_model_len": "1"}))
    except (InvalidParameterError, CapacityError):
        return {}
    longest = min(sizing.safe_length, sizing.model_limit)
    return {**options, "max_model_len": str(longest)} if longest >= 1 else {}


def _tried(sizer: Sizer, question: PlanQuestion, options: Mapping[str, str]) -> Sizing | None:
    """Return the memory divided with a change, if it fits."""
    try:
        changed = with_options(question, options)
        sizing = sizer.size(changed)
    except (InvalidParameterError, CapacityError):
        return None
    return sizing if sizing.fits else None


def as_flags(options: Mapping[str, str]) -> str:
    """Return options as a command line takes them."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def rank_options(question: PlanQuestion, tensor: int, stages: int) -> dict[str, str]:
    """Return the options that ask for so many ranks, spelt as the question spelt its own."""
    if question.tensor_parallel_size is None:
        return {"devices": str(tensor * stages)}
    both = {"tensor_parallel_size": str(tensor)}
    # Where the number of devices was said as well, it would contradict the new size.
    return both if question.devices is None else {**both, "devices": str(tensor * stages)}


def with_options(question: PlanQuestion, options: Mapping[str, str]) -> PlanQuestion:
    """Return the question with options changed, given as a person writes them.

    Raises:
        InvalidParameterError: a value is not allowed.
    """
    values: dict[str, Any] = dict(options)
    if "max_model_len" in values:
        values["is_length_auto"] = False
    return replace(question, **values)


def _warnings(question: PlanQuestion, base: Sizing) -> Iterator[Advice]:
    free = base.memory_bytes - base.usable_bytes if base.engine != "octavo" else base.headroom_bytes
    if not base.pool.is_exact and base.low_blocks < base.kv.blocks_for(base.max_model_len):
        safe = base.safe_length
        yield Advice(
            kind="warning",
            text=f"a close fit: the pool may turn out as small as {_gib(max(0, base.pool.low_bytes))}, too little for"
            f" one request of {base.max_model_len:,} tokens" + (f"; {safe:,} are safe" if safe >= 1 else ""),
            options={"max_model_len": str(safe)} if safe >= 1 else {},
        )
    elif base.max_concurrency < _LITTLE_CONCURRENCY:
        yield Advice(
            kind="warning",
            text=f"little is left: the KV pool of {_gib(base.pool_bytes)} holds"
            f" {format_concurrency(base.max_concurrency)} requests of {base.max_model_len:,} tokens;"
            " one that grows while another runs is preempted",
        )
    if free < _LITTLE_BYTES and (device_of(question) is not None or base.engine != "octavo"):
        yield Advice(
            kind="warning",
            text=f"only {max(0, free) / GIB:.2f} GiB stay free beside the engine: another process, or a peak that the"
            " engine did not see at its start, ends it for lack of memory",
        )
    if (
        base.max_concurrency > base.max_num_seqs + 1
        and question.kv_cache_memory is None
        and question.num_blocks is None
    ):
        enough = (base.kv.blocks_for(base.max_model_len) * base.max_num_seqs + 1) * base.kv.block_bytes
        yield Advice(
            kind="note",
            text=f"the pool takes what the rest leaves; {base.max_num_seqs:,} requests of {base.max_model_len:,}"
            f" tokens, as many as run at once, need {_gib(enough)} of it: `--kv-cache-memory {-(-enough // MIB)}MiB`"
            " would do",
            options={"kv_cache_memory": f"{-(-enough // MIB)}MiB"},
        )
    if not base.is_length_asked and base.max_model_len < base.model_limit:
        yield Advice(
            kind="note",
            text=f"the model takes {base.model_limit:,} tokens, {base.max_model_len:,} fit",
        )


def _about_lengths(base: Sizing, lengths: Lengths | None) -> Iterator[Advice]:
    if lengths is None or not base.max_model_len:
        return
    kept = lengths.up_to(base.max_model_len)
    num_kept = kept.num_requests if kept else 0
    if num_kept < lengths.num_requests:
        refused = lengths.num_requests - num_kept
        yield Advice(
            kind="warning",
            text=f"{refused:,} of {lengths.num_requests:,} requests ({refused / lengths.num_requests:.1%}) are longer"
            f" than {base.max_model_len:,} tokens and would be refused; they are not counted",
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 4 else format_bytes(num_bytes)
