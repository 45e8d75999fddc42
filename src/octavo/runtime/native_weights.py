"""Weights as the native kernels hold them: packed one product at a time while a model file is read.

How each is held is decided in `models/held_kinds.py`. Only the tensors of products that are still incomplete exist
beside the packed ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
import numpy.typing as npt

from octavo.models.held_kinds import HeldDtype, held_kind
from octavo.models.program import (
    Embed,
    EmbedPosition,
    ExpertLinear,
    Linear,
    Program,
    WeightName,
    vector_weights,
)
from octavo.models.weights import Tensor
from octavo.runtime import _native
from octavo.runtime.held_rows import hold

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


def pack_weights(
    tensors: Iterable[Tensor],
    program: Program,
    *,
    weight_dtype: HeldDtype = "stored",
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
    norm_names = {name for op in program.ops for name in vector_weights(op)}
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
        if isinstance(op, Embed | EmbedPosition):
            products[(op.weight,), ()] = None
        elif isinstance(op, ExpertLinear):
            products.update(dict.fromkeys((names, ()) for names in op.weights))
        elif isinstance(op, Linear):
            products[op.weights, op.biases] = None
    return products


def _pack(
    product: Product, tensors: dict[WeightName, Tensor], weight_dtype: HeldDtype, isa: str
) -> _native.PackedLinear:
    weights, biases = product
    parts = []
    for index, name in enumerate(weights):
        tensor = tensors[name]
        kind = held_kind(name, tensor.shape, tensor.kind, weight_dtype)
        bias = np.ascontiguousarray(tensors[biases[index]].to_f32()) if biases else None
        parts.append((kind, hold(tensor, kind).reshape(-1), prod(tensor.shape[:-1]), bias))
    # A set that was named is meant: no wider one, though it would give the same bits.
    return _native.pack_linear(parts, tensors[weights[0]].shape[-1], isa, may_widen=isa == "auto")
