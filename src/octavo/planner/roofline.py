"""The second ceiling: how many requests a device holds at an inter-token latency, whatever its memory holds.

A decode step reads the weights once and every request's cached keys and values, and computes each request's token:

    step time = max( (weights + requests x KV bytes of one) / bandwidth,  requests x flop of one / compute )

Rates are a data sheet's with an efficiency, or measured ones. What else a step takes (launches, talk between devices,
prefill chunks in the same step) is left out, so the ceiling is the most that can be hoped for, and is labelled so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.planner.devices import Device

SpeedSource = Literal["roofline", "measured"]
Bound = Literal["bandwidth", "compute"]

# Shares of the peaks that decode kernels were seen to reach: memory as NVIDIA's ai-dynamo/aiconfigurator assumes it
# (0.8; 0.5 for Arc B60), matrix products a rounded-down figure for batches below a thousand rows.
_BANDWIDTH_EFFICIENCY = 0.8
_SLOW_BANDWIDTH_EFFICIENCY = {"arc-b60": 0.5}
_COMPUTE_EFFICIENCY = 0.6

MOST_REQUESTS = 1 << 20
"""Where the search ends: what is held beyond that is of no interest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Rates that a step can count on.

    Args:
        label: `roofline` (peaks x efficiency) or `measured`.
        source: The efficiencies or the measurement, in words.
    """

    bandwidth_bytes_per_s: float
    flop_per_s: float
    label: SpeedSource
    source: str

    def __post_init__(self) -> None:
        assert self.bandwidth_bytes_per_s > 0 and self.flop_per_s > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """What one step costs, on one device of the parallel group.

    Args:
        weight_bytes: Weights that every step reads, whatever it computes.
        expert_bytes: Weights of all experts of a mixture, of which a step reads those that its tokens visit.
        expert_share: Experts that one token visits, as a share of a layer's experts; 0 if the model is no mixture.
        kv_bytes_per_request: Cached bytes that one request's token attends to, at the mean length.
        flop_per_request: 2 for each weight that a token uses, and attention.
    """

    weight_bytes: float
    expert_bytes: float = 0.0
    expert_share: float = 0.0
    kv_bytes_per_request: float
    flop_per_request: float

    def read_bytes(self, num_requests: int) -> float:
        """Return the bytes that a step reads; experts are visited as if each token chose at random."""
        visited = 1.0 - (1.0 - self.expert_share) ** num_requests
        return self.weight_bytes + visited * self.expert_bytes + num_requests * self.kv_bytes_per_request

    def step_time_s(self, num_requests: int, speed: DeviceSpeed) -> float:
        """Return how long a step of one token for each request takes."""
        return max(self._times_s(num_requests, speed))

    def bound(self, num_requests: int, speed: DeviceSpeed) -> Bound:
        """Say which of the two a step waits for."""
        reading_s, computing_s = self._times_s(num_requests, speed)
        return "bandwidth" if reading_s >= computing_s else "compute"

    def _times_s(self, num_requests: int, speed: DeviceSpeed) -> tuple[float, float]:
        return (
            self.read_bytes(num_requests) / speed.bandwidth_bytes_per_s,
            num_requests * self.flop_per_request / speed.flop_per_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCeiling:
    """How many requests a device holds at an inter-token latency.

    Args:
        num_requests: 0 where even one request's step takes longer.
        step_time_s: Of so many requests; of one where none is held.
        bound: What a step of so many requests waits for.
        label, source: Of the rates that were used.
    """

    itl_s: float
    num_requests: int
    step_time_s: float
    bound: Bound
    label: SpeedSource
    source: str

    def binds(self, memory_requests: float) -> bool:
        """Say whether the device's speed holds fewer requests than its memory."""
        return self.num_requests < memory_requests


def roofline_speed(device: Device, *, weight_dtype: str = "bf16") -> DeviceSpeed | None:
    """Return a share of a device's peaks; `None` where its compute is not known.

    Args:
        weight_dtype: `fp8` computes at the fp8 rate where the device has one; all else at the fp16 rate.
    """
    peak = device.fp8_flop_per_s if weight_dtype == "fp8" and device.fp8_flop_per_s else device.fp16_flop_per_s
    if peak is None:
        return None
    efficiency = _SLOW_BANDWIDTH_EFFICIENCY.get(device.id, _BANDWIDTH_EFFICIENCY)
    return DeviceSpeed(
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * efficiency,
        flop_per_s=peak * _COMPUTE_EFFICIENCY,
        label="roofline",
        source=(
            f"roofline: {efficiency:.0%} of {device.bandwidth_bytes_per_s / 1e9:,.0f} GB/s and"
            f" {_COMPUTE_EFFICIENCY:.0%} of {peak / 1e12:,.1f} TFLOP/s ({device.source})"
        ),
    )


def measured_speed(*, gb_per_s: float, gflop_per_s: float, source: str) -> DeviceSpeed:
    """Return rates as measured, e.g. by `octavo bench kernels`."""
    return DeviceSpeed(
        bandwidth_bytes_per_s=gb_per_s * 1e9, flop_per_s=gflop_per_s * 1e9, label="measured", source=source
    )


def device_ceiling(work: DecodeWork, speed: DeviceSpeed, *, itl_s: float) -> DeviceCeiling:
    """Return the most requests whose step takes no longer than `itl_s`; a step's time only grows with them."""
    fits, too_many = 0, MOST_REQUESTS + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if work.step_time_s(middle, speed) <= itl_s:
            fits = middle
        else:
            too_many = middle
    shown = max(fits, 1)
    return DeviceCeiling(
        itl_s=itl_s,
        num_requests=fits,
        step_time_s=work.step_time_s(shown, speed),
        bound=work.bound(shown, speed),
        label=speed.label,
        source=speed.source,
    )


def kv_tokens_like_weights(*, weight_bytes: int, token_bytes: int) -> int:
    """Return the cached tokens at which the KV cache is as large as the weights, rounded up."""
    return -(-weight_bytes // token_bytes)
