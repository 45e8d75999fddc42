"""Every native kernel at a model's shapes, against what the machine can do in the same minute. No printing.

Needs a model's headers only: weights are random, of the kinds and shapes that the model would be held in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.config.engine import EngineConfig, WeightDtype
from octavo.config.machine import read_machine
from octavo.config.resolved import ResolvedConfig
from octavo.errors import InvalidParameterError, MachineError
from octavo.llm.assemble import model_facts
from octavo.models.download import Progress, ignore_progress
from octavo.models.fetch import fetch
from octavo.models.held_kinds import held_kind
from octavo.models.load import OpenedModel, open_model
from octavo.models.program import Linear
from octavo.models.tensor_kinds import TensorKind
from octavo.planner.resolve import resolve

if TYPE_CHECKING:
    from octavo.runtime.kernel_speed import KernelSpeed
    from octavo.runtime.linear_speed import MachineLimits

PRODUCT_ROWS = (1, 4, 16, 64, 512)
COLD_ROWS = 4
"""Up to so many rows a product is bound by reading weights, and is timed on as many as the model has."""
COLD_BYTES = 256 << 20
"""Weights of a cold product at most."""

OnProgress = Callable[[int, int], None]
"""Called with the measurements done and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """One product of a model, and how its weights would be held."""

    name: str
    kind: TensorKind
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """What a run came to."""

    config: ResolvedConfig
    kernels_name: str
    limits: MachineLimits
    speeds: tuple[KernelSpeed, ...]


def run_kernels(
    config: EngineConfig, *, progress: Progress | None = None, on_progress: OnProgress | None = None
) -> KernelBench:
    """Measure limits, then products, then everything else.

    Raises:
        InvalidParameterError: the reference runner was asked for; it has no kernels.
        MachineError: there is no native module.
        OctavoError: the model cannot be found, or would not fit.
    """
    model = open_model(fetch(config.model, progress=progress or ignore_progress).path)
    facts = model_facts(model, config)
    if config.runner == "reference":
        raise InvalidParameterError("has no kernels to time", param="--runner", hints=("`--runner native`",))
    if facts.native_refusal:
        raise MachineError("there are no kernels to time", because=facts.native_refusal)
    resolved = resolve(config, read_machine(), facts)
    from octavo.runtime import _native, kernel_speed  # noqa: PLC0415 - needs the native module
    from octavo.runtime.machine_limits import limits_with_threads  # noqa: PLC0415

    products = product_shapes(model, resolved.weight_dtype)
    batches = kernel_speed.fitting((*kernel_speed.DECODES, *kernel_speed.PREFILLS), model.spec.max_position)
    count = _Count(1 + len(products) * len(PRODUCT_ROWS) + len(batches) + 1, on_progress)
    limits = limits_with_threads(resolved.threads)
    count.add()
    speeds = list(_time_products(products, resolved, count))
    if batches:
        speeds += kernel_speed.measure_layers(
            model.spec,
            batches,
            kv_cache_dtype=resolved.kv_cache_dtype,
            threads=resolved.threads,
            isa=resolved.instruction_set,
            on_batch=count.add,
        )
    speeds += kernel_speed.measure_sampling(model.spec, threads=resolved.threads, isa=resolved.instruction_set)
    count.add()
    return KernelBench(
        config=resolved, kernels_name=_native.isa_name(resolved.instruction_set), limits=limits, speeds=tuple(speeds)
    )


def product_shapes(model: OpenedModel, weight_dtype: Literal["stored"] | WeightDtype) -> list[ProductShape]:
    """Return the different products of a model; weights of one product held in two kinds count as two."""
    shapes: dict[ProductShape, None] = {}
    for op in model.program.ops:
        if not isinstance(op, Linear):
            continue
        by_kind: dict[TensorKind, list[str]] = {}
        for name in op.weights:
            entry = model.tensors[name]
            by_kind.setdefault(held_kind(name, entry.shape, entry.kind, weight_dtype), []).append(name)
        for kind, names in by_kind.items():
            shape = ProductShape(
                name="head" if names[0] in ("embed", "lm_head") else ", ".join(name.split(".")[-1] for name in names),
                kind=kind,
                num_outputs=sum(model.tensors[name].shape[0] for name in names),
                num_inputs=model.tensors[names[0]].shape[1],
            )
            shapes[shape] = None
    return list(shapes)


class _Count:
    """Counts measurements and reports them."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._total = total
        self._num_done = 0
        self._on_progress = on_progress

    def add(self) -> None:
        self._num_done += 1
        if self._on_progress is not None:
            self._on_progress(self._num_done, self._total)


def _time_products(products: list[ProductShape], resolved: ResolvedConfig, count: _Count) -> Iterator[KernelSpeed]:
    from octavo.runtime.kernel_speed import KernelSpeed  # noqa: PLC0415 - needs the native module
    from octavo.runtime.linear_speed import measure_linear  # noqa: PLC0415

    for product in products:
        for num_rows in PRODUCT_ROWS:
            speed = measure_linear(
                product.kind,
                [(product.num_outputs, product.num_inputs)],
                num_rows,
                resolved.threads,
                isa=resolved.instruction_set,
                min_weight_bytes=min(resolved.weight_bytes, COLD_BYTES) if num_rows <= COLD_ROWS else 0,
            )
            count.add()
            activation_bytes = num_rows * (product.num_inputs + product.num_outputs) * 4
            yield KernelSpeed(
                kernel=f"product, {product.name}",
                kind=product.kind,
                num_rows=num_rows,
                context_tokens=None,
                wall_s=speed.wall_s,
                flop=speed.flops * speed.wall_s,
                num_bytes=speed.bytes_per_s * speed.wall_s + activation_bytes,
            )
