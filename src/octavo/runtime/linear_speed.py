"""How fast the native matrix products are, against what the machine can do in the same minute.

Two limits bound a product: with few rows the weights' bytes over the memory's read bandwidth, with many rows its
floating-point operations over the speed of a float32 product in NumPy. Integer products may exceed the latter. Of
several passes the quickest counts: what disturbs a pass on a shared machine only ever makes it slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from octavo.models.tensor_kinds import KIND_LAYOUTS, TensorKind, row_bytes
from octavo.runtime import _native

Shape = tuple[int, int]
"""`(num_outputs, num_inputs)` of one product."""

_SGEMM_SIZE = 1536
_READ_BYTES = 512 << 20
_PASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Measured, not looked up; `sgemm` is NumPy's with whatever threads its BLAS uses."""

    sgemm_flops: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpeed:
    """One product, or several in a row, at one number of rows."""

    kind: TensorKind
    kernels: str
    shapes: tuple[Shape, ...]
    num_rows: int
    threads: int
    wall_s: float
    flops: float
    bytes_per_s: float


def measure_limits(threads: int) -> MachineLimits:
    """Time a float32 product in NumPy and a read of 512 MiB; takes about a second and 0.5 GiB."""
    left = np.random.default_rng(0).standard_normal((_SGEMM_SIZE, _SGEMM_SIZE), dtype=np.float32)
    times = []
    for _ in range(_PASSES):
        start = perf_counter()
        left @ left
        times.append(perf_counter() - start)
    read_s = min(_native.time_read(_READ_BYTES, threads, _PASSES))
    return MachineLimits(sgemm_flops=2 * _SGEMM_SIZE**3 / min(times), read_bytes_per_s=_READ_BYTES / read_s)


def measure_linear(
    kind: TensorKind,
    shapes: Sequence[Shape],
    num_rows: int,
    threads: int,
    *,
    min_weight_bytes: int = 0,
    isa: str = "auto",
    passes: int = _PASSES,
) -> LinearSpeed:
    """Time products with random weights, one after the other.

    Args:
        kind: Kind of all weights.
        shapes: Of the products of one pass.
        num_rows: Rows of activations.
        threads: Threads of the team.
        min_weight_bytes: Copies are made until a pass reads so many bytes, so that no cache holds the weights.
        isa: Instruction set of the kernels; `auto` allows a wider one of the same bits.
        passes: Passes, of which the quickest counts.
    """
    pass_bytes = sum(outputs * row_bytes(kind, inputs, tensor="benchmark") for outputs, inputs in shapes)
    copies = max(1, -(-min_weight_bytes // pass_bytes))
    rows = [_random_rows(kind, shape) for shape in shapes]
    products = [
        _native.pack_linear([(kind, data, shape[0], None)], shape[1], isa, may_widen=isa == "auto")
        for _ in range(copies)
        for data, shape in zip(rows, shapes, strict=True)
    ]
    seconds = min(_native.time_linears(products, num_rows, threads, passes)) / copies
    operations = 2 * num_rows * sum(outputs * inputs for outputs, inputs in shapes)
    return LinearSpeed(
        kind=kind,
        kernels=products[0].kernels,
        shapes=tuple(shapes),
        num_rows=num_rows,
        threads=threads,
        wall_s=seconds,
        flops=operations / seconds,
        bytes_per_s=pass_bytes / seconds,
    )


def _random_rows(kind: TensorKind, shape: Shape) -> NDArray[np.uint8]:
    """Return random rows, flat; with ordinary scales, since the speed of NaN and of tiny numbers proves nothing."""
    outputs, inputs = shape
    layout = KIND_LAYOUTS[kind]
    num_blocks = outputs * inputs // layout.block_size
    blocks = np.random.default_rng(1).integers(0, 128, (num_blocks, layout.block_bytes), dtype=np.uint8)
    if layout.block_size > 1:
        scale = np.array([0.01, -0.05], np.float16).view(np.uint8)
        at = slice(208, 210) if kind == "q6_k" else slice(0, 2 if kind in ("q8_0", "q4_0") else 4)
        blocks[:, at] = scale[: at.stop - at.start]
    else:
        blocks[:, -1] &= 63  # floats below 2
    return blocks.reshape(-1)
