"""The engines whose spending is known, by name: `engine_budget` applies the rules of one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.errors import InvalidParameterError
from octavo.planner import sglang_budget, vllm_budget
from octavo.planner.devices import Device
from octavo.planner.engine_budget import BudgetCase, EngineBudget, EngineSettings, WeightsFrom
from octavo.planner.engine_version import EngineVersion, parse_version
from octavo.planner.estimate import Estimate
from octavo.planner.forward_shape import ForwardShape
from octavo.planner.loaded_weights import loaded_weights
from octavo.units import quote

_Rule = Callable[[BudgetCase], EngineBudget]

_RULES: dict[str, tuple[_Rule, EngineVersion]] = {
    "vllm": (vllm_budget.vllm_budget, vllm_budget.NEWEST),
    "sglang": (sglang_budget.sglang_budget, sglang_budget.NEWEST),
}


def engine_budget(
    engine: str,
    *,
    forward: ForwardShape,
    weights: Estimate,
    settings: EngineSettings,
    device: Device | None = None,
    visible: Estimate | None = None,
    version: str | None = None,
    weights_from: WeightsFrom = "config",
) -> EngineBudget:
    """Return how `engine` will spend one device's memory.

    Args:
        weights: Bytes of one device's share of the weights, as counted; what loading adds is added here.
        device, visible: One of them; `visible` wins, for a person's own `--memory`.
        version: As a person or a log writes it; `None` is the newest release that the rules know.
        weights_from: Where `weights` were counted.

    Raises:
        InvalidParameterError: another engine, a version that is no release number, or a CPU.
    """
    if engine not in _RULES:
        raise InvalidParameterError(
            f"{quote(engine)} is not an engine whose spending is known",
            param="engine",
            because=f"there are rules for {' and '.join(_RULES)}",
            hints=("write for example `--engine vllm`",),
        )
    if device is not None and device.kind == "cpu":
        raise InvalidParameterError(
            f"there are no rules for {engine} on a CPU",
            param="device",
            because="there it measures nothing: its KV pool is a setting",
            hints=("leave `--engine` out to plan for Octavo, which runs there",),
        )
    rule, newest = _RULES[engine]
    seen = visible or (device.visible if device else None)
    assert seen is not None, "a device or its visible memory is needed"
    budget = rule(
        BudgetCase(
            device=device,
            visible=seen,
            forward=forward,
            weights=loaded_weights(weights, forward, weights_from=weights_from),
            settings=settings,
            version=newest if version is None else parse_version(version),
        )
    )
    if device is None or device.name.startswith("NVIDIA"):
        return budget
    note = f"no start of {engine} on such a device was read: the rules are those of NVIDIA's, and may be off"
    return replace(budget, notes=(*budget.notes, note))
