"""A model that Octavo runs as a `ModelShape`, whatever kind of file it came from: a GGUF file has no `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.models.kv_groups import layer_windows
from octavo.models.names import tensor_shapes
from octavo.models.shape import Layer, LayerKV, ModelShape
from octavo.models.spec import ModelSpec
from octavo.models.weight_tensor import TensorRole, WeightTensor

_TOP: dict[str, TensorRole] = {"embed": "embedding", "positions": "other", "lm_head": "head"}
_ATTENTION = frozenset({"q", "k", "v", "qkv", "o"})
_BIAS = "_bias"


@dataclass(slots=True)
class _Tally:
    count: int = 0
    layers: dict[int, None] = field(default_factory=dict)


def shape_of_spec(spec: ModelSpec, *, dtype: str = "float16") -> ModelShape:
    """Count a model by the tensors that Octavo loads.

    Args:
        dtype: How weights are stored, in words; GGUF files mix kinds, and their headers say the bytes.
    """
    tallies: dict[tuple[str, tuple[int, ...]], _Tally] = {}
    for name, shape in tensor_shapes(spec).items():
        pattern, layer = _pattern(name)
        for piece in _pieces(spec, pattern, shape):
            tally = tallies.setdefault(piece, _Tally())
            tally.count += 1
            if layer is not None:
                tally.layers[layer] = None
    return ModelShape(
        name=spec.name,
        architecture=spec.architecture,
        dtype=dtype,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        layers=_layers(spec),
        tensors=tuple(_tensor(spec, pattern, shape, tally) for (pattern, shape), tally in tallies.items()),
        intermediate_size=spec.intermediate_size,
        is_tied=spec.tie_embeddings,
    )


def _layers(spec: ModelSpec) -> tuple[Layer, ...]:
    windows = layer_windows(spec.kv_groups) if spec.kv_groups else (None,) * spec.num_layers
    return tuple(
        Layer(
            kv=LayerKV(
                kind="full" if window is None else "sliding",
                num_kv_heads=spec.num_kv_heads,
                key_dim=spec.head_dim,
                value_dim=spec.head_dim,
                window=window,
            )
        )
        for window in windows
    )


def _pattern(name: str) -> tuple[str, int | None]:
    """Return a name with `*` for its numbers, and its layer."""
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "layers" else None
    return ".".join("*" if part.isdecimal() else part for part in parts), layer


def _pieces(spec: ModelSpec, pattern: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Cut a tensor that holds several products in one, since ranks divide each by itself."""
    for fused, names, widths in (
        ("qkv", ("q", "k", "v"), (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)),
        ("gate_up", ("gate", "up"), (spec.intermediate_size,) * 2),
    ):
        stem, _, part = pattern.rpartition(".")
        if part.removesuffix(_BIAS) == fused:
            rows = [width * spec.head_dim if fused == "qkv" else width for width in widths]
            suffix = _BIAS if part.endswith(_BIAS) else ""
            return [(f"{stem}.{name}{suffix}", (row, *shape[1:])) for name, row in zip(names, rows, strict=True)]
    return [(pattern, shape)]


def _tensor(spec: ModelSpec, pattern: str, shape: tuple[int, ...], tally: _Tally) -> WeightTensor:
    part = pattern.rpartition(".")[2].removesuffix(_BIAS)
    role = _role(pattern, part)
    is_matrix = len(shape) > 1
    active = None
    if role == "expert" and spec.mixture is not None:
        active = tally.count * spec.mixture.num_active // spec.mixture.num_experts
    return WeightTensor(
        name=f"{pattern.removesuffix(_BIAS)}_proj.{'bias' if pattern.endswith(_BIAS) else 'weight'}",
        role=role,
        rows=shape[0] if is_matrix else 1,
        columns=shape[-1],
        count=tally.count,
        num_active=active,
        layers=tuple(tally.layers),
        num_shards=_num_shards(spec, part, role, shape),
        is_linear=is_matrix and role in ("attention", "mlp", "expert"),
    )


def _role(pattern: str, part: str) -> TensorRole:
    if part in _TOP:
        return _TOP[part]
    if part.endswith("_norm"):
        return "norm"
    if part in _ATTENTION:
        return "attention"
    if part == "router":
        return "router"
    return "expert" if ".experts." in pattern else "mlp"


def _num_shards(spec: ModelSpec, part: str, role: TensorRole, shape: tuple[int, ...]) -> int:
    """Return the most ranks that can share a tensor; what adds to every rank's sum (`o` and `down` biases) is whole."""
    is_bias = len(shape) == 1
    if role == "attention":
        return 1 if is_bias and part == "o" else spec.num_kv_heads if part in ("k", "v") else spec.num_heads
    if role in ("mlp", "expert"):
        return (1 if is_bias else shape[-1]) if part == "down" else shape[0]
    return 1
