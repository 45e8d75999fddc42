"""Names of tensors: our own, Hugging Face's and GGUF's; and which tensors a model has, with their shapes.

ours                 Hugging Face                                  GGUF
embed                model.embed_tokens.weight                     token_embd.weight
layers.7.q           model.layers.7.self_attn.q_proj.weight        blk.7.attn_q.weight
layers.7.q_bias      model.layers.7.self_attn.q_proj.bias          blk.7.attn_q.bias
final_norm           model.norm.weight                             output_norm.weight
lm_head              lm_head.weight                                output.weight
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from octavo.models.spec import ModelSpec

_TOP = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "lm_head": ("lm_head", "output"),
}
_LAYER = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "o": ("self_attn.o_proj", "attn_output"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
_BIAS = "_bias"


def hf_name(name: str) -> str:
    """Translate `layers.0.q_bias` to `model.layers.0.self_attn.q_proj.bias`."""
    return _translate(name, 0, "model.layers")


def gguf_name(name: str) -> str:
    """Translate `layers.0.q_bias` to `blk.0.attn_q.bias`."""
    return _translate(name, 1, "blk")


def canonical_names(spec: ModelSpec, spelling: Callable[[str], str]) -> dict[str, str]:
    """Return our name for each name a file of this model may use: the inverse of `hf_name` or `gguf_name`."""
    return {spelling(name): name for name in tensor_shapes(spec)}


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the model by our name, with its shape, rows first. A tied head has no tensor."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        for name, shape in _layer_shapes(spec).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def count_parameters(spec: ModelSpec) -> int:
    """Count the model's numbers exactly; a tied head counts once. O(1) in the number of layers."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    per_layer = sum(prod(shape) for shape in _layer_shapes(spec).values())
    num_tables = 1 if spec.tie_embeddings else 2
    return num_tables * vocab * hidden + spec.num_layers * per_layer + hidden


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_width, hidden),
        "k": (kv_width, hidden),
        "v": (kv_width, hidden),
        "o": (hidden, q_width),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    biased: tuple[str, ...] = ("q", "k", "v") if spec.qkv_bias else ()
    biased += ("o",) if spec.output_bias else ()
    biased += ("gate", "up", "down") if spec.mlp_bias else ()
    return shapes | {name + _BIAS: shapes[name][:1] for name in biased}


def _translate(name: str, column: int, layers: str) -> str:
    suffix = "bias" if name.endswith(_BIAS) else "weight"
    stem = name.removesuffix(_BIAS)
    if stem in _TOP:
        return f"{_TOP[stem][column]}.{suffix}"
    _, layer, inner = stem.split(".")
    return f"{layers}.{layer}.{_LAYER[inner][column]}.{suffix}"
