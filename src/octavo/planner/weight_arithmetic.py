"""What a model's weights take on one device: from its shape, by dtype or packing, divided as parallel engines do.

    unquantised   elements x bytes of the dtype
    packed        elements x bits / 8 + a scale (and zero point) per group of them; what the scheme leaves alone stays
    tensor ranks  heads, widths and rows of tables are divided; norms, routers and latent projections are whole on each
    stages        layers are cut into runs; the embedding is in the first, the head (a tied one, too) in the last

Files that are here are counted by their headers instead (`OpenedModel`), which is exact whatever the scheme.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.models.packing import Packing, named_packing
from octavo.models.shape import ModelShape
from octavo.models.weight_tensor import WeightTensor
from octavo.planner.kv_arithmetic import pipeline_stages
from octavo.units import cdiv, round_up

_DTYPE_BYTES = {"float32": 4, "f32": 4, "float": 4, "float16": 2, "f16": 2, "half": 2, "bfloat16": 2, "bf16": 2}
# vLLM pads a vocabulary so that ranks get equal parts, and experts in 4 bits to the tiles of their kernels: their
# inputs and outputs, and each rank's part of their inner width.
_VOCABULARY_MULTIPLE = 64
_TILE_HIDDEN, _TILE_INNER = 256, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Weights of one device, and how they are stored: `bfloat16`, `fp8, else bfloat16`."""

    num_bytes: int
    stored_as: str


def rank_weights(
    shape: ModelShape,
    *,
    weight_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    is_padded: bool = False,
) -> RankWeights:
    """Return the weights of the device that holds the most.

    Args:
        weight_dtype: `auto` (as the config says), a dtype, a scheme of `packing.PACKINGS`, or a GGUF kind.
        is_padded: Vocabulary and experts in MXFP4 are padded as vLLM does.

    Raises:
        InvalidParameterError: a scheme whose bytes are not known.
    """
    dtype, packing = _stored(shape, weight_dtype)
    stages = pipeline_stages(len(shape.layers), pipeline_parallel_size)
    most = max(
        sum(
            _tensor_bytes(tensor, share, dtype, packing, tensor_parallel_size, is_padded=is_padded)
            for tensor in shape.tensors
            for share in [_share(shape, tensor, stage, number, len(stages))]
            if share
        )
        for number, stage in enumerate(stages)
    )
    name = dtype if packing is None else packing.name if packing.packs_all else f"{packing.name}, else {dtype}"
    return RankWeights(num_bytes=round(most), stored_as=name)


def _stored(shape: ModelShape, weight_dtype: str) -> tuple[str, Packing | None]:
    if weight_dtype == "auto":
        return shape.dtype, shape.packing
    if weight_dtype in _DTYPE_BYTES:
        return weight_dtype, None
    return shape.dtype if shape.dtype != "float32" else "bfloat16", named_packing(weight_dtype)


def _share(shape: ModelShape, tensor: WeightTensor, stage: Iterable[int], number: int, num_stages: int) -> int:
    """Return how many of a tensor's copies a stage holds."""
    if tensor.layers:
        per_layer = tensor.count // len(tensor.layers)
        held = set(stage)
        return per_layer * sum(layer in held for layer in tensor.layers)
    is_first, is_last = number == 0, number == num_stages - 1
    if tensor.role == "embedding":
        is_needed_last = shape.is_tied and is_last
        return tensor.count if is_first or is_needed_last else 0
    if tensor.role in ("head", "norm"):
        return tensor.count if is_last else 0
    return tensor.count if is_first else 0


def _tensor_bytes(
    tensor: WeightTensor, count: int, dtype: str, packing: Packing | None, num_ranks: int, *, is_padded: bool
) -> float:
    rows = tensor.rows
    if is_padded and tensor.role in ("embedding", "head") and rows > 1:
        rows = round_up(rows, _VOCABULARY_MULTIPLE)
    shards = rows if tensor.role in ("embedding", "head") and rows > 1 else tensor.num_shards
    part = cdiv(shards, min(num_ranks, shards)) / shards
    if packing is not None and packing.packs(tensor):
        if is_padded and packing.name == "mxfp4" and tensor.role == "expert":
            return count * packing.matrix_bytes(*_padded_expert(tensor, num_ranks))
        return count * part * packing.matrix_bytes(rows, tensor.columns)
    return count * part * rows * tensor.columns * _DTYPE_BYTES.get(dtype, 2)


def _padded_expert(tensor: WeightTensor, num_ranks: int) -> tuple[int, int]:
    """Return rows and columns of one rank's part of an expert's matrix: its inner width is what ranks divide."""
    inner = round_up(cdiv(tensor.num_shards, num_ranks), _TILE_INNER)
    hidden = tensor.columns if tensor.num_shards == tensor.rows else tensor.rows
    return inner, round_up(hidden, _TILE_HIDDEN)
