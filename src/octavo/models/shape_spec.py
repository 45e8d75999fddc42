"""The shape of a model that this engine runs, from its spec: the bytes that `shape_config` counts from its config."""

from __future__ import annotations

from octavo.models.gguf_config import spec_from_gguf
from octavo.models.gguf_file import GgufHeader
from octavo.models.kv_groups import layer_windows
from octavo.models.names import tensor_shapes
from octavo.models.shape import Layer, LayerKV, ModelShape
from octavo.models.spec import ModelSpec
from octavo.models.weight_tensor import TensorRole, WeightTensor

_ROLES: dict[str, TensorRole] = {
    "embed": "embedding",
    "lm_head": "head",
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "o": "attention",
    "gate": "mlp",
    "up": "mlp",
    "down": "mlp",
    "router": "router",
}


def shape_from_spec(spec: ModelSpec, *, dtype: str = "bfloat16") -> ModelShape:
    """Count a model that this engine runs.

    Args:
        dtype: How its weights are stored, as configs name it; a spec does not say.
    """
    windows = layer_windows(spec.kv_groups) if spec.kv_groups else (None,) * spec.num_layers
    return ModelShape(
        name=spec.name,
        architecture=spec.architecture,
        dtype=dtype,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        layers=tuple(_layer(spec, window) for window in windows),
        tensors=_tensors(spec),
        intermediate_size=spec.intermediate_size,
        is_tied=spec.tie_embeddings,
    )


def shape_from_gguf(header: GgufHeader) -> ModelShape:
    """Count the model of a GGUF file, of the architectures that this engine runs.

    The dtype is that of its unquantised tensors; its packed ones are counted by the header itself.

    Raises:
        UnsupportedModelError: an architecture, rotary scaling or field that we do not run.
        ModelFileError: a field is missing or has an impossible value.
    """
    return shape_from_spec(spec_from_gguf(header), dtype="float16")


def _layer(spec: ModelSpec, window: int | None) -> Layer:
    return Layer(
        kv=LayerKV(
            kind="full" if window is None else "sliding",
            num_kv_heads=spec.num_kv_heads,
            key_dim=spec.head_dim,
            value_dim=spec.head_dim,
            window=window,
        )
    )


def _tensors(spec: ModelSpec) -> tuple[WeightTensor, ...]:
    """Merge the tensors of all layers that have the same name and size."""
    layers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, shape in tensor_shapes(spec).items():
        prefix, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        in_layer = prefix == "layers" and number.isdigit()
        held = layers.setdefault((f"layers.*.{part}" if in_layer else name, shape), [])
        if in_layer:
            held.append(int(number))
    return tuple(_tensor(spec, name, shape, tuple(held)) for (name, shape), held in layers.items())


def _tensor(spec: ModelSpec, name: str, shape: tuple[int, ...], layers: tuple[int, ...]) -> WeightTensor:
    part = name.rpartition(".")[2]
    role = _ROLES.get(part.removesuffix("_bias"), "norm" if "norm" in part else "other")
    is_matrix = len(shape) > 1
    rows, columns = (shape[0], shape[-1]) if is_matrix else (1, shape[0])
    shards = {"q": spec.num_heads, "o": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    is_whole = part in ("o_bias", "down_bias")
    num_shards = shards.get(part.removesuffix("_bias"), spec.intermediate_size if role == "mlp" else 1)
    return WeightTensor(
        name=name if "*" not in name else f"{name}.weight",
        role=role,
        rows=rows,
        columns=columns,
        count=max(1, len(layers)),
        layers=layers,
        num_shards=1 if is_whole else shape[0] if role in ("embedding", "head") else num_shards,
        is_linear=is_matrix and role in ("attention", "mlp", "expert"),
    )
