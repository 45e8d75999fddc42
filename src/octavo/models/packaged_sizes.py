"""Sizes of the models that have an alias, as their files state them, for plans before anything is downloaded.

A test compares them with the file itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from octavo.models.tensor_kinds import TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedSizes:
    """What a packaged file holds.

    Args:
        config: Its sizes, spelt as in a `config.json`.
        embedding_kind, matrix_kind: How the embedding, and all other matrices, are stored; vectors are f32.
    """

    config: Mapping[str, Any] = field(hash=False)
    embedding_kind: TensorKind
    matrix_kind: TensorKind

    def kind_of(self, name: str, shape: tuple[int, ...]) -> TensorKind:
        """Return how the file stores a tensor, by our name for it."""
        if len(shape) == 1:
            return "f32"
        return self.embedding_kind if name == "embed" else self.matrix_kind


PACKAGED_SIZES: Mapping[str, PackagedSizes] = MappingProxyType(
    {
        "smollm2-135m": PackagedSizes(
            config={
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 49152,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_theta": 100000.0,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
                "bos_token_id": 1,
                "eos_token_id": 2,
                "torch_dtype": "bfloat16",
            },
            embedding_kind="q8_0",
            matrix_kind="q4_1",
        )
    }
)
