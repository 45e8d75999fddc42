"""Names of tensors: our own, Hugging Face's and GGUF's; and which tensors a model has, with their shapes.

ours                     Hugging Face                                  GGUF
embed                    model.embed_tokens.weight                     token_embd.weight
layers.7.q               model.layers.7.self_attn.q_proj.weight        blk.7.attn_q.weight
layers.7.q_bias          model.layers.7.self_attn.q_proj.bias          blk.7.attn_q.bias
layers.7.experts.2.up    model.layers.7.mlp.experts.2.up_proj.weight   blk.7.ffn_up_exps.weight, part 2
final_norm               model.norm.weight                             output_norm.weight
lm_head                  lm_head.weight                                output.weight

Families that spell some of them differently have a table of what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

from octavo.models.spec import ModelSpec

_BIAS = "_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spelling:
    """How files of one format and family name their tensors.

    Args:
        layers: Prefix of the number of a layer.
        top, layer: Our name to theirs, without `.weight`. Experts are `experts.*.up` and so on.
    """

    layers: str
    top: Mapping[str, str] = field(hash=False)
    layer: Mapping[str, str] = field(hash=False)


_HF = _Spelling(
    layers="model.layers",
    top={"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"},
    layer={
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "qkv": "self_attn.qkv_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
        "mlp_post_norm": "post_feedforward_layernorm",
        "router": "mlp.gate",
        "experts.*.gate": "mlp.experts.*.gate_proj",
        "experts.*.up": "mlp.experts.*.up_proj",
        "experts.*.down": "mlp.experts.*.down_proj",
    },
)
_HF_GPT2 = _Spelling(
    layers="transformer.h",
    top={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    layer={
        "attn_norm": "ln_1",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
)
_HF_GEMMA = _Spelling(layers=_HF.layers, top=_HF.top, layer={**_HF.layer, "mlp_norm": "pre_feedforward_layernorm"})
_HF_MIXTRAL = _Spelling(
    layers=_HF.layers,
    top=_HF.top,
    layer={
        **_HF.layer,
        "router": "block_sparse_moe.gate",
        "experts.*.gate": "block_sparse_moe.experts.*.w1",
        "experts.*.up": "block_sparse_moe.experts.*.w3",
        "experts.*.down": "block_sparse_moe.experts.*.w2",
    },
)
_HF_OF = {
    "gpt2": _HF_GPT2,
    "gpt_bigcode": _HF_GPT2,
    "gemma2": _HF_GEMMA,
    "gemma3": _HF_GEMMA,
    "mixtral": _HF_MIXTRAL,
}
_GGUF = _Spelling(
    layers="blk",
    top={"embed": "token_embd", "positions": "position_embd", "final_norm": "output_norm", "lm_head": "output"},
    layer={
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "qkv": "attn_qkv",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "attn_post_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "gate_up": "ffn_up",  # of models that have no other
        "down": "ffn_down",
        "mlp_post_norm": "post_ffw_norm",
        "router": "ffn_gate_inp",
        "experts.*.gate": "ffn_gate_exps.*",
        "experts.*.up": "ffn_up_exps.*",
        "experts.*.down": "ffn_down_exps.*",
    },
)


def hf_name(name: str, architecture: str = "") -> str:
    """Translate `layers.0.q_bias` to `model.layers.0.self_attn.q_proj.bias`."""
    return _translate(name, _HF_OF.get(architecture, _HF))


def is_product_bias(name: str) -> bool:
    """Return whether a vector is added to a product; norms have biases, too."""
    return name.endswith(_BIAS) and not name.endswith(f"_norm{_BIAS}")


def gguf_name(name: str) -> str:
    """Translate `layers.0.q_bias` to `blk.0.attn_q.bias`; an expert's part of a stack gets the expert's number."""
    return _translate(name, _GGUF)


def hf_spelling(spec: ModelSpec) -> Callable[[str], str]:
    """Return `hf_name` for the files of a model's family."""
    return partial(hf_name, architecture=spec.architecture)


def canonical_names(spec: ModelSpec, spelling: Callable[[str], str]) -> dict[str, str]:
    """Return our name for each name a file of this model may use: the inverse of `hf_name` or `gguf_name`."""
    return {spelling(name): name for name in tensor_shapes(spec)}


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the model by our name, with its shape, rows first. A tied head has no tensor."""
    top = _top_shapes(spec)
    shapes: dict[str, tuple[int, ...]] = {name: top.pop(name) for name in ("embed", "positions") if name in top}
    for layer in range(spec.num_layers):
        for name, shape in _layer_shapes(spec).items():
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes | top


def count_parameters(spec: ModelSpec) -> int:
    """Count the model's numbers exactly; a tied head counts once. O(1) in the number of layers."""
    per_layer = sum(prod(shape) for shape in _layer_shapes(spec).values())
    return sum(prod(shape) for shape in _top_shapes(spec).values()) + spec.num_layers * per_layer


def _top_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, spec.hidden_size)}
    if spec.has_learned_positions:
        shapes["positions"] = (spec.max_position, spec.hidden_size)
    shapes["final_norm"] = (spec.hidden_size,)
    if spec.has_layer_norm:
        shapes["final_norm_bias"] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes = _attention_shapes(spec) | _mlp_shapes(spec)
    norms = [name for name in shapes if name.endswith("norm") and spec.has_layer_norm]
    biased = [*norms, *(name for name in ("q", "k", "v", "qkv") if spec.qkv_bias)]
    biased += ["o"] if spec.output_bias else []
    biased += ["gate", "up", "gate_up", "down"] if spec.mlp_bias else []
    return shapes | {name + _BIAS: shapes[name][:1] for name in biased if name in shapes}


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)} if spec.norm_places != "after" else {}
    if spec.has_fused_qkv:
        shapes["qkv"] = (q_width + 2 * kv_width, hidden)
    else:
        shapes |= {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden)}
    shapes["o"] = (hidden, q_width)
    if spec.qk_norm:
        widths = (q_width, kv_width) if spec.qk_norm_spans_heads else (spec.head_dim, spec.head_dim)
        shapes |= {"q_norm": widths[:1], "k_norm": widths[1:]}
    if spec.norm_places != "before":
        shapes["attn_post_norm"] = (hidden,)
    return shapes


def _mlp_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"mlp_norm": (hidden,)} if spec.norm_places != "after" else {}
    if spec.mixture is not None:
        size = spec.mixture.expert_size
        shapes["router"] = (spec.mixture.num_experts, hidden)
        for expert in range(spec.mixture.num_experts):
            shapes[f"experts.{expert}.gate"] = (size, hidden)
            shapes[f"experts.{expert}.up"] = (size, hidden)
            shapes[f"experts.{expert}.down"] = (hidden, size)
    elif spec.has_fused_gate_up:
        shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    else:
        shapes |= {"gate": (inner, hidden)} if spec.has_gate else {}
        shapes |= {"up": (inner, hidden), "down": (hidden, inner)}
    if spec.norm_places != "before":
        shapes["mlp_post_norm"] = (hidden,)
    return shapes


def _translate(name: str, spelling: _Spelling) -> str:
    suffix = "bias" if name.endswith(_BIAS) else "weight"
    stem = name.removesuffix(_BIAS)
    if stem in spelling.top:
        return f"{spelling.top[stem]}.{suffix}"
    _, layer, inner = stem.split(".", 2)
    if not inner.startswith("experts."):
        return f"{spelling.layers}.{layer}.{spelling.layer[inner]}.{suffix}"
    _, expert, part = inner.split(".")
    theirs = spelling.layer[f"experts.*.{part}"].replace("*", expert)
    return f"{spelling.layers}.{layer}.{theirs}.{suffix}"
