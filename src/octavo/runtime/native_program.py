"""A Program in the numbered form that the C++ executor takes: names become indices, buffers get their places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.models.arena import Arena, row_stride
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    BufferName,
    Combine,
    Embed,
    EmbedPosition,
    ExpertLinear,
    HeadRmsNorm,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    Route,
    SelectRows,
    SoftCap,
    WeightName,
)
from octavo.models.rope import attention_scaling, inverse_frequencies
from octavo.models.spec import KVGroup, ModelSpec

Product = tuple[tuple[WeightName, ...], tuple[WeightName, ...]]
"""Weights that lie side by side in one product, and their biases."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedProgram:
    """Ops and buffers as records of numbers, and what the numbers of weights stand for.

    Args:
        products: Weights by number that embeddings look up and products multiply with. One that both use is one copy.
        vectors: Weights of norms by number.
    """

    ops: list[Record]
    buffers: list[Record]
    buffer_numbers: dict[BufferName, int]
    products: tuple[Product, ...]
    vectors: tuple[WeightName, ...]
    logits: int


@dataclass(slots=True)
class _Numbering:
    """Hands out numbers in order of first use."""

    buffers: dict[BufferName, int]
    products: dict[Product, int] = field(default_factory=dict)
    vectors: dict[WeightName, int] = field(default_factory=dict)

    def product(self, weights: tuple[WeightName, ...], biases: tuple[WeightName, ...] = ()) -> int:
        return self.products.setdefault((weights, biases), len(self.products))

    def vector(self, name: WeightName) -> int:
        return self.vectors.setdefault(name, len(self.vectors))


def number_program(program: Program, arena: Arena) -> NumberedProgram:
    """Resolve the names of a program."""
    numbering = _Numbering(buffers={name: number for number, name in enumerate(program.buffers)})
    ops = [_record(op, numbering) for op in program.ops]
    buffers = [
        {
            "width": buffer.width,
            "stride": row_stride(buffer.width),
            "offset_bytes": arena.offsets[name],
            "is_selected": buffer.rows == "selected",
        }
        for name, buffer in program.buffers.items()
    ]
    return NumberedProgram(
        ops=ops,
        buffers=buffers,
        buffer_numbers=numbering.buffers,
        products=tuple(numbering.products),
        vectors=tuple(numbering.vectors),
        logits=numbering.buffers[program.logits],
    )


def model_sizes(spec: ModelSpec) -> Record:
    """Return what the executor must know of a model beside its program."""
    groups = spec.kv_groups or (KVGroup(layers=tuple(range(spec.num_layers))),)
    places = {layer: (group, index) for group, kv in enumerate(groups) for index, layer in enumerate(kv.layers)}
    has_rope = spec.rope.kind != "none" and spec.rope.rotary_dim > 0
    local_rope = spec.local_rope
    return {
        "vocab_size": spec.vocab_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rotary_dim": spec.rope.rotary_dim if has_rope else 0,
        "inverse_frequencies": list(inverse_frequencies(spec.rope)) if has_rope else [],
        "attention_scaling": attention_scaling(spec.rope),
        "local_frequencies": [] if local_rope is None else list(inverse_frequencies(local_rope)),
        "local_scaling": 1.0 if local_rope is None else attention_scaling(local_rope),
        "layer_groups": [places[layer][0] for layer in range(spec.num_layers)],
        "layer_indices": [places[layer][1] for layer in range(spec.num_layers)],
        "num_groups": len(groups),
    }


def _record(op: Op, numbering: _Numbering) -> Record:  # noqa: C901, PLR0912 - one case for each kind of op
    buffers = numbering.buffers
    match op:
        case Embed():
            return {
                "kind": "embed",
                "out": buffers[op.out],
                "weight": numbering.product((op.weight,)),
                "value": op.scale,
            }
        case EmbedPosition():
            return {"kind": "embed_position", "out": buffers[op.out], "weight": numbering.product((op.weight,))}
        case LayerNorm():
            return {
                "kind": "layer_norm",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "weight": numbering.vector(op.weight),
                "bias": numbering.vector(op.bias),
                "value": op.eps,
            }
        case RmsNorm():
            return {
                "kind": "rms_norm",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "weight": numbering.vector(op.weight),
                "value": op.eps,
            }
        case HeadRmsNorm():
            return {
                "kind": "head_rms_norm",
                "x": buffers[op.x],
                "weight": numbering.vector(op.weight),
                "offset": op.offset,
                "num_heads": op.num_heads,
                "head_dim": op.head_dim,
                "value": op.eps,
            }
        case Linear():
            return {
                "kind": "linear",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "weight": numbering.product(op.weights, op.biases),
            }
        case RopeStore():
            return {
                "kind": "rope_store",
                "x": buffers[op.qkv],
                "layer": op.layer,
                "is_local": op.is_local,
                "sink_q": -1 if op.sink_q is None else buffers[op.sink_q],
                "sink_position": op.sink_position,
            }
        case Attend():
            return {
                "kind": "attend",
                "x": buffers[op.qkv],
                "out": buffers[op.out],
                "layer": op.layer,
                "value": op.scale,
                "window": op.window or 0,
                "softcap": op.softcap,
                "sparse_tiles": op.sparse_blocks,
                "num_sinks": op.num_sinks,
                "sink_q": -1 if op.sink_q is None else buffers[op.sink_q],
            }
        case Add():
            return {"kind": "add", "x": buffers[op.x], "out": buffers[op.y]}
        case Activate():
            return {
                "kind": "activate",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "is_gelu": op.kind == "gelu_tanh",
                "has_gate": op.has_gate,
                "num_parts": op.num_parts,
            }
        case SoftCap():
            return {"kind": "soft_cap", "x": buffers[op.x], "value": op.cap}
        case Route():
            return {
                "kind": "route",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "num_active": op.num_active,
                "is_normalised": op.is_normalised,
            }
        case ExpertLinear():
            return {
                "kind": "expert_linear",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "routes": buffers[op.routes],
                "gathered": buffers[op.gathered],
                "product": buffers[op.product],
                "experts": [numbering.product(names) for names in op.weights],
                "num_active": op.num_active,
                "is_split": op.is_split,
            }
        case Combine():
            return {
                "kind": "combine",
                "x": buffers[op.x],
                "out": buffers[op.out],
                "routes": buffers[op.routes],
                "num_active": op.num_active,
            }
        case SelectRows():
            return {"kind": "select_rows", "x": buffers[op.x], "out": buffers[op.out]}
