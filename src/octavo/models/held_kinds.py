"""How a tensor is held in memory by the native kernels: the one rule of loader and planner.

A tensor is kept as its file stores it where a kernel exists for that; any other is decoded and held in the nearest
form at least as precise. Plain Python, so that a plan needs neither NumPy nor the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal

from octavo.config.engine import WeightDtype
from octavo.errors import InvalidParameterError
from octavo.models.names import is_product_bias
from octavo.models.program import WeightName
from octavo.models.tensor_entry import TensorEntry
from octavo.models.tensor_kinds import KIND_LAYOUTS, TensorKind, nearest_kind, row_bytes
from octavo.units import round_up

HELD_KINDS: tuple[TensorKind, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
"""Kinds that have kernels."""

PANEL_ROWS = 16
"""Rows of a matrix lie in panels of so many; the last one is filled up with zeros."""

HeldDtype = Literal["stored"] | WeightDtype

_KIND_OF_DTYPE: dict[WeightDtype, TensorKind] = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "int8": "q8_0",
    "int4": "q4_1",
}


def held_kind(name: WeightName, shape: tuple[int, ...], kind: TensorKind, weight_dtype: HeldDtype) -> TensorKind:
    """Return the kind a tensor is held in; vectors are float32.

    Raises:
        InvalidParameterError: rows that are not whole groups of the dtype asked for.
    """
    if len(shape) == 1:
        return "f32"
    if weight_dtype == "stored":
        held = nearest_kind(kind, HELD_KINDS)
        # Rows of a decoded kind may be no whole number of groups.
        return held if shape[-1] % KIND_LAYOUTS[held].block_size == 0 else "f32"
    wanted = _KIND_OF_DTYPE[weight_dtype]
    group = KIND_LAYOUTS[wanted].block_size
    if shape[-1] % group:
        raise InvalidParameterError(
            f"{weight_dtype} does not suit this model",
            param="weight_dtype",
            because=f"it packs {group} values a group, and rows of {name} have {shape[-1]}",
            hints=("--weight-dtype f16 suits every model",),
        )
    return wanted


def held_entry_kind(entry: TensorEntry, weight_dtype: HeldDtype) -> TensorKind:
    """Return the kind a stored tensor is held in; see `held_kind`."""
    return held_kind(entry.name, entry.shape, entry.kind, weight_dtype)


def held_bytes(name: WeightName, shape: tuple[int, ...], kind: TensorKind) -> int:
    """Return the bytes of a tensor held as `kind`: matrices, and biases of products, in whole panels."""
    num_rows = prod(shape[:-1])
    if len(shape) > 1:
        return round_up(num_rows, PANEL_ROWS) * row_bytes(kind, shape[-1], tensor=name)
    length = round_up(shape[0], PANEL_ROWS) if is_product_bias(name) else shape[0]
    return row_bytes(kind, length, tensor=name)


def held_as(entries: Iterable[TensorEntry], weight_dtype: HeldDtype) -> str:
    """Say in words how the matrices of a model are held: `q4_1 and q8_0, as the file stores them`."""
    kinds = sorted({held_entry_kind(entry, weight_dtype) for entry in entries if len(entry.shape) > 1})
    return " and ".join(kinds) + (", as the file stores them" if weight_dtype == "stored" else "")
