"""Calibration: how far the rules for an engine were off one real start, and a budget corrected by it.

A log tells what weights, activations and the rest took. What holds for other settings too is kept: weights and
activations scale with the settings, so their *ratio* to the rule is; the overhead does not, so its *distance* is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from octavo.errors import InvalidParameterError
from octavo.planner.devices import Device
from octavo.planner.engine_budget import EngineBudget, EngineSettings, WeightsFrom
from octavo.planner.engine_rules import engine_budget
from octavo.planner.estimate import Estimate, around, exact, remainder
from octavo.planner.forward_shape import ForwardShape
from octavo.planner.loaded_weights import loaded_weights
from octavo.planner.start_log import StartLog
from octavo.units import GIB, format_bytes, quote

TermName = Literal["weights", "activation", "overhead", "activation and overhead", "CUDA graphs", "KV pool"]

_ROUNDING_BYTES = int(0.005 * GIB)
# A second start of the same release was seen to differ by so much: other neighbours on the device, other drivers.
_AGAIN_SHARE, _WEIGHTS_AGAIN_SHARE, _AGAIN_BYTES = 0.02, 0.003, int(0.02 * GIB)

# Weights that differ by more are another model's, or the same packed otherwise.
_ANOTHER_MODEL = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class TermDifference:
    """One term of the budget: what the rule said, and what the log says."""

    term: TermName
    rule: Estimate
    logged_bytes: int

    @property
    def difference_bytes(self) -> int:
        """How much more there really was than the rule said."""
        return self.logged_bytes - self.rule.value_bytes

    @property
    def difference_ratio(self) -> float | None:
        """The difference as a share of what there really was; `None` where that is nothing."""
        return self.difference_bytes / abs(self.logged_bytes) if self.logged_bytes else None

    @property
    def is_inside(self) -> bool:
        """Whether the interval held it, give or take how logs are rounded."""
        return self.rule.low_bytes - _ROUNDING_BYTES <= self.logged_bytes <= self.rule.high_bytes + _ROUNDING_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one log teaches.

    Args:
        rule_budget: The rules' budget for the settings of the log.
        terms: Those that the log states.
        weight_ratio: Weights as loaded over the rule's; 1 where the log does not tell.
        activation_ratio: Real activation peak over the rule's; 1 where the log does not tell it apart.
        overhead_bytes: Real overhead less the rule's.
        ranks: Devices that shared each layer, and stages; what was learnt holds for the same cut alone.
    """

    rule_budget: EngineBudget
    terms: tuple[TermDifference, ...]
    weight_ratio: float
    activation_ratio: float
    overhead_bytes: int
    source: str
    ranks: tuple[int, int] = (1, 1)

    def corrected(self, budget: EngineBudget) -> EngineBudget:
        """Return a budget of the same engine and release, for any settings, corrected by the log."""
        states_overhead = any("overhead" in each.term for each in self.terms)
        states_activation = any("activation" in each.term for each in self.terms)
        weights, activation, overhead, graphs = budget.weights, budget.activation, budget.overhead, budget.graphs
        if any(each.term == "weights" for each in self.terms):
            weights = _again(
                weights.value_bytes * self.weight_ratio, source=self.source, doubt_share=_WEIGHTS_AGAIN_SHARE
            )
        if states_activation:
            activation = _again(activation.value_bytes * self.activation_ratio, source=self.source)
        if states_overhead:
            overhead = _again(overhead.value_bytes + self.overhead_bytes, source=self.source)
        logged_graphs = [each.logged_bytes for each in self.terms if each.term == "CUDA graphs"]
        if logged_graphs and graphs.value_bytes > 0:
            graphs = _again(logged_graphs[0], source=self.source)
        counted = (weights, activation, overhead, *((graphs,) if budget.graphs_inside else ()))
        return replace(
            budget,
            weights=weights,
            activation=activation,
            overhead=overhead,
            graphs=graphs,
            kv_pool=remainder(budget.usable, *counted, source=f"{budget.kv_pool.source}; {self.source}"),
        )


def calibrate(
    log: StartLog,
    *,
    forward: ForwardShape,
    weights: Estimate,
    settings: EngineSettings,
    device: Device | None = None,
    weights_from: WeightsFrom = "config",
) -> Calibration:
    """Compare a start with the rules for its release.

    Args:
        forward, weights: Of the model that was started; `weights` is one device's share.
        settings: For what the log does not state; what it states wins.
        device: Likewise, for the memory.
        weights_from: Where `weights` were counted.

    Raises:
        InvalidParameterError: an engine without rules, a log that lacks what is to be compared, or another model's.
    """
    if log.engine == "llama.cpp":
        raise InvalidParameterError(
            "there is no rule for llama.cpp to correct",
            param="calibrate",
            because="llama.cpp takes the KV cache that it is told to, and nothing is left to a rule",
            hints=("give a start-up log of vLLM or SGLang",),
        )
    visible = None if log.visible_bytes is None else exact(log.visible_bytes, source="the log")
    if log.engine == "sglang" and device is not None:
        visible = device.visible  # SGLang prints what is free once its own libraries are loaded, which is less
    if visible is None and device is None:
        raise InvalidParameterError(
            "the log does not say how much memory the device has",
            param="calibrate",
            because="many releases of vLLM print it only with `VLLM_LOGGING_LEVEL=DEBUG`",
            hints=("name the device, for example `--device h100`",),
        )
    logged_weights = weights if log.weight_bytes is None else exact(log.weight_bytes, source="the log")
    settings = logged_settings(log, settings)
    rule = engine_budget(
        log.engine,
        forward=forward,
        weights=logged_weights,
        settings=settings,
        device=device,
        visible=visible,
        version=log.version,
        weights_from=weights_from if log.weight_bytes is None else "log",
    )
    weights = loaded_weights(weights, forward, weights_from=weights_from)
    _check_same_model(log, weights)
    terms = _differences(log, rule, weights)
    by_name = {each.term: each for each in terms}
    activation = by_name.get("activation")
    rest = by_name.get("overhead") or by_name.get("activation and overhead")
    if not terms:
        raise InvalidParameterError(
            "the log states no term that could be compared",
            param="calibrate",
            because="weights, activation peak, or the room for the KV pool were expected",
            hints=("give the whole output of a start, from the first line until the server answers",),
        )
    return Calibration(
        rule_budget=replace(rule, weights=weights),
        terms=terms,
        weight_ratio=1.0 if log.weight_bytes is None else log.weight_bytes / weights.value_bytes,
        activation_ratio=1.0
        if activation is None or not rule.activation.value_bytes
        else activation.logged_bytes / rule.activation.value_bytes,
        overhead_bytes=0 if rest is None else rest.difference_bytes,
        ranks=(settings.tensor_parallel_size, settings.pipeline_parallel_size),
        source=f"calibrated by a log of {log.engine} {log.version or rule.version}"
        + (f" that names {quote(log.model)}" if log.model else ""),
    )


def _check_same_model(log: StartLog, weights: Estimate) -> None:
    """Refuse a log whose weights are far from the model's: what it teaches would be wrong for it."""
    if log.weight_bytes is None or 1 / _ANOTHER_MODEL < log.weight_bytes / weights.value_bytes < _ANOTHER_MODEL:
        return
    named = f"it names {quote(log.model)}" if log.model else "it names no model"
    raise InvalidParameterError(
        f"the log is of another model: {format_bytes(log.weight_bytes)} of weights were loaded on one device,"
        f" this model has {format_bytes(weights.value_bytes)}",
        param="calibrate",
        because=f"a log teaches about the model that was started; {named}",
        hints=("plan for that model, or say with `--weight-dtype` how its weights were loaded",),
    )


def logged_settings(log: StartLog, settings: EngineSettings) -> EngineSettings:
    """Return the settings of the start: the log's where it states them, else those given."""
    return EngineSettings(
        max_model_len=log.max_model_len or settings.max_model_len,
        utilization=settings.utilization if log.utilization is None else log.utilization,
        max_num_seqs=log.max_num_seqs or settings.max_num_seqs,
        max_num_batched_tokens=log.max_num_batched_tokens or settings.max_num_batched_tokens,
        block_size=log.block_size or settings.block_size,
        tensor_parallel_size=log.tensor_parallel_size or settings.tensor_parallel_size,
        pipeline_parallel_size=log.pipeline_parallel_size or settings.pipeline_parallel_size,
        is_eager=log.is_eager or settings.is_eager,
    )


def _differences(log: StartLog, rule: EngineBudget, weights: Estimate) -> tuple[TermDifference, ...]:
    terms: list[tuple[TermName, Estimate, int | None]] = [
        ("weights", weights, log.weight_bytes),
        ("activation", rule.activation, log.activation_bytes),
        ("overhead", rule.overhead, _overhead_bytes(log, rule)),
        ("CUDA graphs", rule.graphs, log.graph_bytes),
        ("KV pool", rule.kv_pool, log.kv_pool_bytes),
    ]
    if log.activation_bytes is None:
        # Only what weights and pool leave is known, so the two are compared as one.
        both = _sum(rule.activation, rule.overhead)
        terms[1:3] = [("activation and overhead", both, _rest_bytes(log, rule))]
    return tuple(
        TermDifference(term=term, rule=estimate, logged_bytes=logged)
        for term, estimate, logged in terms
        if logged is not None
    )


def _overhead_bytes(log: StartLog, rule: EngineBudget) -> int | None:
    """Return the overhead that the log states, or else what all other terms leave."""
    if log.overhead_bytes is not None:
        return log.overhead_bytes
    rest = _rest_bytes(log, rule)
    return None if rest is None or log.activation_bytes is None else rest - log.activation_bytes


def _rest_bytes(log: StartLog, rule: EngineBudget) -> int | None:
    if log.weight_bytes is None or log.kv_pool_bytes is None:
        return None
    graph_bytes = (log.graph_bytes or rule.graphs.value_bytes) if rule.graphs_inside else 0
    return rule.usable.value_bytes - log.weight_bytes - log.kv_pool_bytes - graph_bytes


def _sum(first: Estimate, second: Estimate) -> Estimate:
    return Estimate(
        low_bytes=first.low_bytes + second.low_bytes,
        value_bytes=first.value_bytes + second.value_bytes,
        high_bytes=first.high_bytes + second.high_bytes,
        source=first.source,
    )


def _again(num_bytes: float, *, source: str, doubt_share: float = _AGAIN_SHARE) -> Estimate:
    """Return an estimate of what a second start will take, given the first."""
    doubt = doubt_share * abs(num_bytes) + _AGAIN_BYTES
    return around(num_bytes, below=doubt, above=doubt, source=source)
