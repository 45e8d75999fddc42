"""ModelSpec: the sizes of a model, and what its layers keep in the KV cache.

Frozen data without tensors: the planner counts bytes from it, the emitter turns it into a `Program`, the scheduler
takes its KV groups. Units are in the names; a width is a number of elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["none", "default", "linear", "llama3", "yarn", "longrope"]
NormPlaces = Literal["before", "after", "both"]
ActivationKind = Literal["silu", "gelu_tanh"]


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

    `window` is the number of tokens a query sees, its own included; `None` means all of them. With `num_sinks` it sees
    the first ones besides, however far away.
    """

    layers: tuple[int, ...]
    window: int | None = None
    num_sinks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """An MLP of many experts, of which each token uses a few.

    Args:
        num_active: Experts per token: those with the highest router scores.
        expert_size: Width inside one expert.
        is_normalised: Whether the weights of a token's experts are divided by their sum.
    """

    num_experts: int
    num_active: int
    expert_size: int
    is_normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything about a model but its weights.

    `max_position` is the most tokens the model was made for; `num_parameters` is exact and counts a tied head once.
    `eos_token_ids` is the union of what config, generation config and tokenizer name.

    Args:
        qk_norm: Whether q and k are normalised: each head by itself, or all heads of a token together
            (`qk_norm_spans_heads`).
        has_layer_norm: Norms subtract the mean and have biases; otherwise they are RMS norms.
        norm_places: Norms before attention and MLP, after them (before the residual sum), or both.
        has_learned_positions: Positions are looked up in a table and added to the embedding; nothing is rotated.
        has_fused_qkv, has_fused_gate_up: The file keeps q, k and v (gate and up) in one tensor.
        has_gate: The MLP multiplies an activated gate with a second product; otherwise it activates the only one.
        embed_scale: Factor on embeddings.
        attention_scale: Factor on scores; 0 means `head_dim ** -0.5`.
        attention_softcap, logits_softcap: Bound c of `c * tanh(x / c)`; 0 means none.
        local_rope: Rotation of the layers that see a window, where it differs from the others'.
        mixture: Experts in the place of each layer's MLP.
        sparse_blocks: Tiles of 16 tokens that a query reads in each layer but the first ones; 0 means all.
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
    qk_norm_spans_heads: bool = False
    has_layer_norm: bool = False
    norm_places: NormPlaces = "before"
    has_learned_positions: bool = False
    has_fused_qkv: bool = False
    has_fused_gate_up: bool = False
    has_gate: bool = True
    activation: ActivationKind = "silu"
    embed_scale: float = 1.0
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    local_rope: Rope | None = None
    mixture: Mixture | None = None
    sparse_blocks: int = 0
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_groups: tuple[KVGroup, ...] = ()
    num_parameters: int = 0
