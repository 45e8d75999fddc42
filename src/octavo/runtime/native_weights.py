"""Weights as the native kernels hold them: packed one product at a time while a model file is read.

A tensor is kept as its file stores it where a kernel exists for that; any other is decoded and held in the nearest
form at least as precise. Only the tensors of products that are still incomplete exist beside the packed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.config.engine import WeightDtype
from octavo.errors import InvalidParameterError
from octavo.models.program import Embed, HeadRmsNorm, Linear, Program, RmsNorm, WeightName
from octavo.models.tensor_kinds import KIND_LAYOUTS, TensorKind, nearest_kind
from octavo.models.weights import Tensor
from octavo.runtime import _native
from octavo.runtime.held_rows import hold

HELD_KINDS: tuple[TensorKind, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
"""Kinds that have kernels."""

_KIND_OF_DTYPE: dict[WeightDtype, TensorKind] = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "int8": "q8_0",
    "int4": "q4_1",
}

Product = tuple[tuple[WeightName, ...], tuple[WeightName, ...]]


class HeldWeights:
    """Packed products and plain vectors of one model.

    Args:
        products: By the names of their weights and biases.
        vectors: Norm weights, float32.
    """

    def __init__(
        self, products: dict[Product, _native.PackedLinear], vectors: dict[WeightName, npt.NDArray[np.float32]]
    ) -> None:
        self._products = products
        self._vectors = vectors

    def product(self, weights: tuple[WeightName, ...], biases: tuple[WeightName, ...] = ()) -> _native.PackedLinear:
        return self._products[weights, biases]

    def vector(self, name: WeightName) -> npt.NDArray[np.float32]:
        return self._vectors[name]

    @property
    def resident_bytes(self) -> int:
        packed = sum(int(product.resident_bytes) for product in self._products.values())
        return packed + sum(vector.nbytes for vector in self._vectors.values())


def held_kind(
    name: WeightName, shape: tuple[int, ...], kind: TensorKind, weight_dtype: Literal["stored"] | WeightDtype
) -> TensorKind:
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


def pack_weights(
    tensors: Iterable[Tensor],
    program: Program,
    *,
    weight_dtype: Literal["stored"] | WeightDtype = "stored",
    isa: str = "auto",
) -> HeldWeights:
    """Pack the tensors of a program, taking each as it comes.

    Args:
        tensors: Every tensor the program names, in any order; others are an error of ours.
        isa: The instruction set of the runner that will use them.

    Raises:
        InvalidParameterError: rows that are not whole groups of the dtype asked for.
        ModelFileError: a value that the dtype asked for cannot hold.
    """
    missing = {product: set(product[0] + product[1]) for product in _products(program)}
    users: dict[WeightName, list[Product]] = {}
    for product, names in missing.items():
        for name in names:
            users.setdefault(name, []).append(product)
    norm_names = {op.weight for op in program.ops if isinstance(op, RmsNorm | HeadRmsNorm)}
    packed: dict[Product, _native.PackedLinear] = {}
    vectors: dict[WeightName, npt.NDArray[np.float32]] = {}
    waiting: dict[WeightName, Tensor] = {}
    for tensor in tensors:
        if tensor.name in norm_names:
            vectors[tensor.name] = tensor.to_f32()
        if tensor.name not in users:
            assert tensor.name in norm_names, f"{tensor.name} is in no op of the program"
            continue
        waiting[tensor.name] = tensor
        for product in users[tensor.name]:
            missing[product].discard(tensor.name)
            if not missing[product]:
                packed[product] = _pack(product, waiting, weight_dtype, isa)
                missing.pop(product)
        waiting = {name: kept for name, kept in waiting.items() if any(each in missing for each in users[name])}
    assert not missing, f"the tensors of {next(iter(missing))} never came"
    return HeldWeights(packed, vectors)


def _products(program: Program) -> dict[Product, None]:
    """Return the products of a program, each once, in order."""
    products: dict[Product, None] = {}
    for op in program.ops:
        if isinstance(op, Embed):
            products[(op.weight,), ()] = None
        elif isinstance(op, Linear):
            products[op.weights, op.biases] = None
    return products


def _pack(
    product: Product, tensors: dict[WeightName, Tensor], weight_dtype: Literal["stored"] | WeightDtype, isa: str
) -> _native.PackedLinear:
    weights, biases = product
    parts = []
    for index, name in enumerate(weights):
        tensor = tensors[name]
        kind = held_kind(name, tensor.shape, tensor.kind, weight_dtype)
        bias = np.ascontiguousarray(tensors[biases[index]].to_f32()) if biases else None
        parts.append((kind, hold(tensor, kind).reshape(-1), prod(tensor.shape[:-1]), bias))
    return _native.pack_linear(parts, tensors[weights[0]].shape[-1], isa)
