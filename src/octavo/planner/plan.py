"""Plan: the answer to `octavo plan`, as frozen data; what a card, a report and a program read.

    plan = plan_for(PlanQuestion(model="smollm2-135m", memory=2 * GIB))    # octavo.llm.plan finds the model
    plan.max_concurrency, plan.longest_fitting_len

Sizes are those of one device of the parallel group (`scope` says so); lengths and requests are those of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.config.machine import Machine
from octavo.errors import CapacityError, InvalidParameterError
from octavo.planner.advice import Advice, find_advice
from octavo.planner.curves import Curve, find_curves
from octavo.planner.lengths import Lengths
from octavo.planner.levers import Lever, find_levers
from octavo.planner.next_command import next_command
from octavo.planner.question import PlanQuestion
from octavo.planner.roofline import DeviceSpeed, roofline_speed
from octavo.planner.sizer import Sizer, choose_engine, device_of, ranks
from octavo.planner.sizing import GroupCost, Sizing
from octavo.planner.subject import Subject
from octavo.planner.targets import TargetAnswer, find_targets, holds_target
from octavo.planner.trace import read_trace
from octavo.planner.two_ceilings import Ceilings, find_ceilings
from octavo.units import format_concurrency

if TYPE_CHECKING:
    from octavo.planner.calibrate import TermDifference

SCHEMA = "octavo.plan/1"
_MOST_HINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """Where one figure comes from.

    Args:
        is_exact: It is arithmetic; otherwise it lies between `low_bytes` and `high_bytes`, as far as is known.
    """

    name: str
    source: str
    is_exact: bool
    low_bytes: int | None = None
    high_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a plan needs to know beside question and model.

    Args:
        machine: This machine.
        native_refusal: Why the native runner cannot be used on it; empty if it can.
        calibrate_path: A start-up log, or measured speed, to learn from; see `learned.py`.
    """

    machine: Machine
    native_refusal: str = ""
    calibrate_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one device's memory is divided, and what that holds.

    Args:
        parameters: Numbers in the model, a tied head counted once.
        memory_bytes: What the device has for it; weights, activation peak, overhead, headroom and pool add up to it.
        usable_memory_bytes: The part that the engine uses.
        headroom_bytes: What stays free; below 0, what is missing.
        kv_pool_bytes: Null block included; the true size is expected between `_low` and `_high`.
        kv_bytes_per_token: While no window is full.
        num_blocks: Blocks that requests can use.
        max_model_len: As asked, or what fits; 0 when nothing does.
        longest_fitting_len: Up to the model's limit.
        max_concurrency: Requests of `max_model_len` tokens at once.
        concurrency_at_lengths: Requests of the asked lengths at once, each at a random step of its answer.
        reserved_concurrency: Requests at once if each reserved a run for `max_model_len` tokens.
        scope: Whether sizes are of `the machine` or of `one device of N`.
        engine_because: Why this engine, where none was asked.
        max_concurrency_low: As `max_concurrency`, with the pool at its low end.
        kv_tokens_like_weights: Cached tokens at which the KV cache is as large as the weights.
        lengths: Mean and quantiles of the asked lengths.
        curves: Requests at once against their length, for each KV dtype.
        calibration: What a start-up log says of each term, against the rule.
        targets: What would hold `--target-concurrency` requests.
        holds_target: Whether the plan itself does; `None` without a target.
        ceilings: How many requests memory holds, and how many the device holds at the asked inter-token latency.
    """

    model: str
    parameters: int
    memory_bytes: int
    usable_memory_bytes: int
    weight_bytes: int
    activation_peak_bytes: int
    overhead_bytes: int
    headroom_bytes: int
    kv_pool_bytes: int
    kv_pool_bytes_low: int
    kv_pool_bytes_high: int
    kv_bytes_per_token: int
    kv_bytes_per_block: int
    block_size: int
    num_blocks: int
    pool_tokens: int
    max_model_len: int
    fits: bool
    longest_fitting_len: int
    max_concurrency: float
    concurrency_at_lengths: float | None
    reserved_concurrency: int
    levers: tuple[Lever, ...]
    advice: tuple[Advice, ...]
    sources: tuple[SourceLine, ...]
    scope: str
    engine: str
    engine_version: str
    engine_because: str
    device: str | None
    num_devices: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_cache_dtype: str
    weights_as: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_allocator: Literal["paged", "reserved"]
    max_concurrency_low: float
    kv_tokens_like_weights: int
    groups: tuple[GroupCost, ...]
    lengths: Mapping[str, float | str] | None = field(hash=False)
    ceilings: Ceilings | None
    curves: tuple[Curve, ...]
    target_concurrency: int | None
    targets: tuple[TargetAnswer, ...]
    holds_target: bool | None
    calibration: tuple[TermDifference, ...]
    next_command: str
    refusal: CapacityError | None = field(compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document `octavo.plan/1`."""
        values: dict[str, Any] = {"schema": SCHEMA}
        for each in fields(self):
            if each.name != "refusal":
                values[each.name] = _plain(getattr(self, each.name))
        return values

    @property
    def is_as_asked(self) -> bool:
        """Whether the engine starts, and holds the target if there is one."""
        return self.fits and self.holds_target is not False

    def check(self) -> None:
        """Return when the plan fits, and holds as many requests as were asked for.

        Raises:
            CapacityError: it does not; the hints are changes that were tried and do.
        """
        if self.is_as_asked:
            return
        if self.fits:
            held = f"{format_concurrency(self.max_concurrency)} of {self.max_model_len:,} tokens"
            if self.concurrency_at_lengths is not None:
                held = f"{format_concurrency(self.concurrency_at_lengths)} of the asked lengths"
            raise CapacityError(
                f"{self.model} does not hold {self.target_concurrency:,} requests at once here",
                because=f"it holds {held}, in {self.max_num_seqs:,} seats",
                hints=tuple(f"`{each.flags}`" for each in self.targets if each.flags)[:_MOST_HINTS],
            )
        changes = tuple(f"`{each.flags}`" for each in self.advice if each.kind == "change")
        missing = next(each.text for each in self.advice if each.kind == "warning")
        because = self.refusal.because if self.refusal else ""
        raise CapacityError(f"{self.model} {missing}", because=because, hints=changes)


def make_plan(question: PlanQuestion, subject: Subject, *, surroundings: Surroundings) -> Plan:
    """Answer a question about a model.

    Args:
        subject: The model that `question.model` means.

    Raises:
        InvalidParameterError: a value contradicts the model, the device or another value.
        UnsupportedModelError: the engine does not run this model, or its layout of it is not known.
    """
    calibration, speed = None, None
    if surroundings.calibrate_path is not None:
        from octavo.planner.learned import learn  # noqa: PLC0415 - most plans learn from nothing

        learned = learn(surroundings.calibrate_path, question, subject)
        question, calibration, speed = learned.question, learned.calibration, learned.speed
    sizer = Sizer(
        subject=subject,
        machine=surroundings.machine,
        native_refusal=surroundings.native_refusal,
        calibration=calibration,
    )
    engine, because = choose_engine(question, subject)
    return _plan(sizer, replace(question, engine=engine), speed, engine_because=because)


def _plan(sizer: Sizer, question: PlanQuestion, speed: DeviceSpeed | None, *, engine_because: str) -> Plan:
    sizing = sizer.size(question)
    lengths = read_trace(Path(question.trace)) if question.trace else question.asked_lengths
    subject, device = sizer.subject, device_of(question)
    if speed is None and device is not None:
        speed = roofline_speed(device, weight_dtype=question.weight_dtype)
    tensor, stages = ranks(question)
    counted = lengths.up_to(sizing.max_model_len) if lengths else None
    _check_prefix(question, sizing, lengths)
    at_lengths = sizing.concurrency_at(counted, shared_tokens=question.shared_prefix or 0) if counted else None
    return Plan(
        model=subject.name,
        parameters=subject.num_parameters,
        memory_bytes=sizing.memory_bytes,
        usable_memory_bytes=sizing.usable_bytes,
        weight_bytes=sizing.weights.value_bytes,
        activation_peak_bytes=sizing.activation.value_bytes,
        overhead_bytes=sizing.overhead.value_bytes,
        headroom_bytes=sizing.headroom_bytes,
        kv_pool_bytes=sizing.pool_bytes,
        kv_pool_bytes_low=max(0, sizing.pool.low_bytes),
        kv_pool_bytes_high=max(0, sizing.pool.high_bytes),
        kv_bytes_per_token=sizing.kv.token_bytes,
        kv_bytes_per_block=sizing.kv.block_bytes,
        block_size=sizing.kv.block_size,
        num_blocks=sizing.num_blocks,
        pool_tokens=sizing.pool_tokens,
        max_model_len=sizing.max_model_len,
        fits=sizing.fits,
        longest_fitting_len=sizing.longest_fitting_len,
        max_concurrency=sizing.max_concurrency,
        concurrency_at_lengths=at_lengths,
        reserved_concurrency=sizing.reserved_concurrency,
        levers=find_levers(sizer, question, sizing, lengths) if sizing.num_blocks else (),
        advice=find_advice(sizer, question, sizing, lengths, has_speed=speed is not None),
        sources=tuple(_sources(sizing, subject.source)),
        scope="the machine" if tensor * stages == 1 else f"one device of {tensor * stages}",
        engine=sizing.engine,
        engine_version=sizing.engine_version,
        engine_because=engine_because,
        device=device.name if device else None,
        num_devices=tensor * stages,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        kv_cache_dtype=sizing.kv_dtype,
        weights_as=sizing.weights_as,
        max_num_seqs=sizing.max_num_seqs,
        max_num_batched_tokens=sizing.max_num_batched_tokens,
        kv_allocator="reserved" if sizing.is_reserved else "paged",
        max_concurrency_low=sizing.max_concurrency_low,
        kv_tokens_like_weights=sizing.tokens_like_weights,
        groups=sizing.kv.groups,
        lengths=_lengths_document(lengths),
        ceilings=find_ceilings(speed, subject.shape, question, sizing, counted),
        curves=find_curves(sizer, question, sizing),
        target_concurrency=question.target_concurrency,
        targets=find_targets(sizer, question, sizing, lengths) if question.target_concurrency else (),
        holds_target=holds_target(sizer, question, sizing, lengths) if question.target_concurrency else None,
        calibration=sizer.calibration.terms if sizer.calibration else (),
        next_command=next_command(question, sizing, subject),
        refusal=sizing.refusal,
    )


def _check_prefix(question: PlanQuestion, sizing: Sizing, lengths: Lengths | None) -> None:
    """Refuse a prefix that no prompt can have."""
    longest = max(each.num_prompt_tokens for each in lengths.classes) if lengths else sizing.length_limit - 1
    if question.shared_prefix is not None and question.shared_prefix > longest:
        raise InvalidParameterError(
            f"{question.shared_prefix:,} tokens are more than any prompt has",
            param="shared_prefix",
            because=f"the longest has {longest:,}",
            hints=(f"`--shared-prefix {longest}`",) if longest else ("leave out --shared-prefix",),
        )


def _sources(sizing: Sizing, model_source: str) -> list[SourceLine]:
    lines = [
        SourceLine(name="model", source=model_source, is_exact=True),
        SourceLine(name="memory", source=sizing.usable_source, is_exact=True),
    ]
    for name, part in (
        ("weights", sizing.weights),
        ("activation peak", sizing.activation),
        ("overhead", sizing.overhead),
        ("KV pool", sizing.pool),
    ):
        lines.append(
            SourceLine(
                name=name,
                source=part.source,
                is_exact=part.is_exact,
                low_bytes=part.low_bytes,
                high_bytes=part.high_bytes,
            )
        )
    return lines


def _lengths_document(lengths: Lengths | None) -> dict[str, float | str] | None:
    if lengths is None:
        return None
    return {
        "source": lengths.source,
        "num_requests": lengths.num_requests,
        "mean_prompt_tokens": lengths.mean_prompt_tokens,
        "mean_output_tokens": lengths.mean_output_tokens,
        "p50_tokens": lengths.quantile_tokens(0.5),
        "p99_tokens": lengths.quantile_tokens(0.99),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value
