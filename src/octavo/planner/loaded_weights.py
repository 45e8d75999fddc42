"""What other engines hold as weights beside those that a model's sizes tell: tables, copies, and towers for images."""

from __future__ import annotations

from octavo.planner.engine_budget import WeightsFrom
from octavo.planner.estimate import Estimate
from octavo.planner.forward_shape import ForwardShape
from octavo.units import GIB

_SOURCE = "rule of 2026-11 on vLLM 0.15 to 0.19 logs: weights loaded against parameters, 33 pairs"


def loaded_weights(counted: Estimate, forward: ForwardShape, *, weights_from: WeightsFrom = "config") -> Estimate:
    """Return what an engine will say that it loaded.

    Logs state 0.0 to 0.9 % more than the parameters: position tables, padded vocabularies, norms on every device.
    Latent attention is held twice, as stored and absorbed. Towers for images weigh 0.4 to 1.4 GiB, and some engines
    give every device of a group the whole tower.
    """
    if weights_from == "log":
        return counted
    value = 0.02 * GIB + 0.0005 * counted.value_bytes
    below, above = value, 0.06 * GIB + 0.008 * counted.value_bytes
    if forward.latent_width:
        value, below, above = value + 0.15 * GIB, below + 0.15 * GIB, above + 0.3 * GIB
    source = f"{counted.source}; {_SOURCE}"
    if forward.is_mixture and not forward.has_expert_buffers:
        below += 0.015 * counted.value_bytes  # experts in MXFP4 were padded to other tiles in each release
    if forward.sees_images and weights_from == "config":
        value, below, above = value + 1.0 * GIB, below + 0.65 * GIB, above + 0.7 * GIB
        source += "; with 0.4 to 1.7 GiB for parts that see images, which the config does not size"
    middle = counted.value_bytes + int(value)
    return Estimate(
        low_bytes=min(middle, counted.low_bytes + int(value - below)),
        value_bytes=middle,
        high_bytes=counted.high_bytes + int(value + above),
        source=source,
    )
