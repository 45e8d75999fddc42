"""ModelSpec: the sizes of a model, and what its layers keep in the KV cache.

Frozen data without tensors: the planner counts bytes from it, the emitter turns it into a `Program`, the scheduler
takes its KV groups. Units are in the names; a width is a number of elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["none", "default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How rotary angles depend on position; fields beyond `theta` and `rotary_dim` serve the scaled kinds.

    Source: the `rope_scaling` / `rope_parameters` field of Hugging Face configs.
    """

    theta: float = 10_000.0
    rotary_dim: int = 0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] = ()
    """Divisors per frequency, as GGUF files carry them (`rope_freqs.weight`); empty when `kind` says it all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with the same KV behaviour; they share block tables and draw equal-sized blocks from one pool.

    `window` is the number of tokens a query sees, its own included; `None` means all of them.
    """

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything about a model but its weights.

    `max_position` is the most tokens the model was made for; `num_parameters` is exact and counts a tied head once.
    `eos_token_ids` is the union of what config, generation config and tokenizer name.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_groups: tuple[KVGroup, ...] = ()
    num_parameters: int = 0
