"""Two ceilings on the requests at once: what memory holds, and what the device's speed holds at a latency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.models.shape import ModelShape
from octavo.planner.lengths import Lengths
from octavo.planner.question import PlanQuestion
from octavo.planner.roofline import DecodeWork, DeviceSpeed, device_ceiling
from octavo.planner.sizer import ranks
from octavo.planner.sizing import Sizing

Binding = Literal["memory", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Where more requests would stop.

    Args:
        context_tokens: What a running request holds on average: the asked lengths half way, or `max_model_len`.
        memory_requests: What the KV pool holds of them.
        memory_step_s: How long a step of so many takes, at least.
        device_requests: What the device holds at `itl_s`; `None` without a latency.
        bound: What a step of `device_requests` (or else `memory_requests`) waits for: `bandwidth` or `compute`.
        binds: Which ceiling is the lower; `None` without a latency.
        source: Of the device's speed.
    """

    itl_s: float | None
    context_tokens: int
    memory_requests: float
    memory_step_s: float
    device_requests: int | None
    bound: str
    binds: Binding | None
    label: str
    source: str

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def find_ceilings(
    speed: DeviceSpeed | None, shape: ModelShape, question: PlanQuestion, sizing: Sizing, lengths: Lengths | None
) -> Ceilings | None:
    """Return both ceilings; `None` where the speed is not known or nothing fits."""
    if speed is None or not sizing.max_model_len or not sizing.num_blocks:
        return None
    context, memory_requests = sizing.max_model_len, sizing.max_concurrency
    if lengths is not None:
        context = max(1, round(lengths.mean_held(float, step=1)))
        memory_requests = sizing.concurrency_at(lengths, shared_tokens=question.shared_prefix or 0)
    work = decode_work(shape, question, sizing, context)
    num_rows = max(1, int(memory_requests))
    itl_s = question.itl_s
    ceiling = device_ceiling(work, speed, itl_s=itl_s) if itl_s is not None else None
    binds: Binding | None = None
    if ceiling is not None:
        binds = "device" if ceiling.binds(memory_requests) else "memory"
    return Ceilings(
        itl_s=itl_s,
        context_tokens=context,
        memory_requests=memory_requests,
        memory_step_s=work.step_time_s(num_rows, speed),
        device_requests=ceiling.num_requests if ceiling else None,
        bound=ceiling.bound if ceiling else work.bound(num_rows, speed),
        binds=binds,
        label=speed.label,
        source=speed.source,
    )


def decode_work(shape: ModelShape, question: PlanQuestion, sizing: Sizing, context_tokens: int) -> DecodeWork:
    """Return what one decode step costs one device; the stages of a pipeline follow one another, so they add up."""
    tensor, stages = ranks(question)
    experts = sum(each.num_elements for each in shape.tensors if each.role == "expert")
    active = sum(each.num_active_elements for each in shape.tensors if each.role == "expert")
    # An embedding is looked up, not read through, unless it is the head as well.
    looked_up = sum(each.num_elements for each in shape.tensors if each.role == "embedding") if not shape.is_tied else 0
    element_bytes = sizing.weights.value_bytes * stages / max(1, shape.num_parameters)
    dense = shape.num_parameters - experts - looked_up
    per_pair = sum(
        2 * shape.num_heads * (layer.kv.key_dim + (layer.kv.value_dim or layer.kv.key_dim))
        for layer in shape.layers
        if layer.kv is not None
    )
    held = sizing.kv.blocks_for(context_tokens) * sizing.kv.block_bytes
    return DecodeWork(
        weight_bytes=dense * element_bytes,
        expert_bytes=experts * element_bytes,
        expert_share=active / experts if experts else 0.0,
        kv_bytes_per_request=float(held * stages),
        flop_per_request=(2.0 * (dense + active) + per_pair * context_tokens) / tensor,
    )
