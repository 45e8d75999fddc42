"""A random model in memory: spec, program and float32 weights, without files.

For tests of runners, which take exactly these three. `tiny_models.py` writes models as files instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.models.attention_window import with_attention_window
from octavo.models.decoder import emit_decoder
from octavo.models.kv_groups import make_kv_groups
from octavo.models.names import tensor_shapes
from octavo.models.program import Program
from octavo.models.spec import ModelSpec, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """What a runner is made of."""

    spec: ModelSpec
    program: Program
    weights: Mapping[str, npt.NDArray[np.float32]]


def make_random_model(
    *,
    windows: tuple[int | None, ...] = (None, None),
    window_and_sinks: tuple[int, int] | None = None,
    seed: int = 0,
    weight_std: float = 0.125,
    **changes: Any,
) -> RandomModel:
    """Draw a model of the Llama family.

    Args:
        windows: One entry per layer: the tokens a query sees, `None` for all. Layers are grouped by it.
        window_and_sinks: Window and sinks put over a model without windows.
        seed: Same seed and sizes, same weights.
        weight_std: 0.125 rather than the usual 0.02, with which the output would hardly depend on the context.
        changes: Fields of `ModelSpec` that differ from a small default.
    """
    sizes: dict[str, Any] = {
        "name": "random",
        "architecture": "llama",
        "vocab_size": 96,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_layers": len(windows),
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 4096,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
    }
    sizes |= changes
    rope = sizes.pop("rope", None) or Rope(rotary_dim=sizes["head_dim"])
    spec = ModelSpec(rope=rope, kv_groups=make_kv_groups(windows), **sizes)
    if window_and_sinks is not None:
        window, num_sinks = window_and_sinks
        spec = with_attention_window(spec, window=window, num_sinks=num_sinks)
    return RandomModel(spec=spec, program=emit_decoder(spec), weights=_draw(spec, seed, weight_std))


def _draw(spec: ModelSpec, seed: int, weight_std: float) -> dict[str, npt.NDArray[np.float32]]:
    """Draw each tensor from a generator of its own; norm weights lie around 1."""
    weights = {}
    for name, shape in tensor_shapes(spec).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(weight_std)
        weights[name] = values + np.float32(1) if name.endswith("norm") else values
    return weights
