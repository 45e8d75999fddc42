"""Native runners around single ops and in-memory weights, for tests of the kernels.

An embedding with float32 weights can put any numbers into a buffer, row by row, so a program of `Embed` and the op
under test runs that op on any input through the same door as a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.config.engine import WeightDtype
from octavo.models.kv_groups import make_kv_groups
from octavo.models.program import Buffer, Embed, Op, Program
from octavo.models.spec import ModelSpec, Rope
from octavo.models.weights import Tensor
from octavo.runtime.native_runner import NativeRunner
from octavo.runtime.native_weights import HeldWeights, pack_weights

Floats = npt.NDArray[np.float32]

INPUT = "input"
"""Buffer that the rows of a probe's table are looked up into."""


def pack_arrays(
    weights: Mapping[str, Floats],
    program: Program,
    *,
    weight_dtype: Literal["stored"] | WeightDtype = "stored",
    isa: str = "auto",
) -> HeldWeights:
    """Pack float32 arrays by our names as if they had come from a file."""
    tensors = (
        Tensor(name=name, shape=array.shape, kind="f32", data=_as_rows(np.ascontiguousarray(array, np.float32)))
        for name, array in weights.items()
    )
    return pack_weights(tensors, program, weight_dtype=weight_dtype, isa=isa)


def probe(
    ops: Sequence[Op],
    table: Floats,
    *,
    buffers: Mapping[str, int],
    selected: Mapping[str, int] | None = None,
    logits: str | None = None,
    weights: Mapping[str, Floats] | None = None,
    windows: tuple[int | None, ...] = (None,),
    sizes: Mapping[str, Any] | None = None,
    **options: Any,
) -> NativeRunner:
    """Return a runner of `Embed` into the buffer "input", then `ops`.

    Args:
        table: What token id i puts into a row of "input".
        buffers: Widths of further buffers with a row per token.
        selected: Widths of buffers with a row per selected token.
        logits: The buffer to sample from; "input" if the ops end before any selection.
        windows: Per layer, the tokens a query sees.
        sizes: Fields of `ModelSpec` that differ from one head of 32.
        options: Arguments of `NativeRunner` that differ from a small default.
    """
    widths = {INPUT: table.shape[1], **buffers}
    program = Program(
        ops=(Embed(out=INPUT, weight="table"), *ops),
        buffers={name: Buffer(width=width, rows="token") for name, width in widths.items()}
        | {name: Buffer(width=width, rows="selected") for name, width in (selected or {}).items()},
        logits=logits or INPUT,
    )
    fields: dict[str, Any] = {
        "name": "probe",
        "architecture": "probe",
        "vocab_size": len(table),
        "hidden_size": table.shape[1],
        "intermediate_size": 1,
        "num_layers": len(windows),
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 32,
        "max_position": 1 << 20,
        "norm_eps": 1e-5,
        "rope": Rope(kind="none"),
        "tie_embeddings": False,
    }
    spec = ModelSpec(kv_groups=make_kv_groups(windows), **(fields | dict(sizes or {})))
    settings: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 16,
        "kv_cache_dtype": "f32",
        "threads": 1,
        "max_num_batched_tokens": max(64, len(table)),
        "max_num_seqs": 64,
        "poison": True,
    }
    settings |= options
    packed = pack_arrays({"table": table, **(weights or {})}, program, isa=settings.get("isa", "auto"))
    return NativeRunner(spec, program, packed, **settings)


def _as_rows(array: Floats) -> npt.NDArray[np.uint8]:
    return array.reshape(array.shape[0] if array.ndim == 2 else 1, -1).view(np.uint8)
