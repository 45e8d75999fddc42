"""Weights for the reference runner: every tensor decoded to float32, rounded first where a narrower dtype is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.config.engine import WeightDtype
from octavo.errors import InvalidParameterError
from octavo.models.program import WeightName
from octavo.models.weights import Progress, WeightSource


def read_reference_weights(
    source: WeightSource,
    *,
    weight_dtype: Literal["stored"] | WeightDtype = "stored",
    progress: Progress | None = None,
) -> dict[WeightName, NDArray[np.float32]]:
    """Read all tensors of a model as float32.

    Args:
        weight_dtype: `stored` and `f32` take the file's values exactly; `f16` and `bf16` round matrices to it first.

    Raises:
        InvalidParameterError: an integer dtype: its arithmetic belongs to the native kernels.
    """
    if weight_dtype not in _ROUNDING:
        raise InvalidParameterError(
            f"the reference runner does not hold weights as {weight_dtype}",
            param="weight_dtype",
            because="it computes in float32; integer weights are the native kernels' arithmetic",
            hints=("`--weight-dtype f32`", "`--runner native`"),
        )
    round_matrix = _ROUNDING[weight_dtype]
    weights = {}
    for tensor in source.read_all(progress):
        values = tensor.to_f32()
        weights[tensor.name] = values if values.ndim == 1 else round_matrix(values)
    return weights


def _keep(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values


def _to_f16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values.astype(np.float16).astype(np.float32)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    bits = values.view(np.uint32)
    # Round to nearest, ties to even, in the upper 16 bits.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


_ROUNDING: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "stored": _keep,
    "f32": _keep,
    "f16": _to_f16,
    "bf16": _to_bf16,
}
