"""The families of models: what sets each apart from the common decoder, and how its configuration says so.

One entry of `FAMILIES` per architecture name in `config.json`. For fields that files of a family commonly leave out,
the family's own default in transformers counts: it is part of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.rope_config import rope_from_hf
from octavo.models.spec import Mixture, ModelSpec

Windows = tuple[int | None, ...]
Parts = dict[str, Any]
"""Fields of `ModelSpec` and their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one architecture apart.

    Args:
        name: In specs.
        title: For people.
        parts: Reads the parts that only this family has, given what all have.
        windows: Reads each layer's window.
        reads: Fields that `parts` reads, and that would otherwise be refused as unknown arithmetic.
        renames: Its own names of the common fields.
        activation_field: Where the activation is named.
        default_inner: Width of the MLP where no field says it, as a multiple of the hidden size; 0 if one must.
        may_omit_kv_heads: Files without a number of key-value heads mean one for each head.
        needs_head_dim: Files must give the width of a head.
    """

    name: str
    title: str
    parts: Callable[[Fields, ModelSpec], Parts]
    windows: Callable[[Fields, int], Windows]
    reads: frozenset[str] = frozenset()
    renames: Mapping[str, str] = field(default_factory=dict, hash=False)
    activation_field: str = "hidden_act"
    default_activation: str = "silu"
    default_inner: int = 0
    default_eps: float = 1e-6
    ties_embeddings: bool = False
    may_omit_kv_heads: bool = False
    needs_head_dim: bool = False

    def renamed(self, fields: Fields) -> Fields:
        """Return the fields under the common names."""
        if not self.renames:
            return fields
        return Fields({self.renames.get(name, name): fields.raw(name) for name in fields.names}, fields.where)


# --- parts ------------------------------------------------------------------------------------------------------------


def _rope(fields: Fields, spec: ModelSpec) -> Parts:
    rope = rope_from_hf(fields.values, fields.where, head_dim=spec.head_dim, max_position=spec.max_position)
    return {"rope": rope}


def _llama_parts(fields: Fields, spec: ModelSpec) -> Parts:
    has_bias = fields.flag("attention_bias", default=False)
    return {
        **_rope(fields, spec),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": fields.flag("mlp_bias", default=False),
    }


def _qwen2_parts(fields: Fields, spec: ModelSpec) -> Parts:
    return {**_rope(fields, spec), "qkv_bias": True}


def _qwen3_parts(fields: Fields, spec: ModelSpec) -> Parts:
    has_bias = fields.flag("attention_bias", default=False)
    return {**_rope(fields, spec), "qkv_bias": has_bias, "output_bias": has_bias, "qk_norm": True}


def _qwen3_moe_parts(fields: Fields, spec: ModelSpec) -> Parts:
    if fields.whole("decoder_sparse_step", 1) != 1 or fields.raw("mlp_only_layers"):
        name = "mlp_only_layers" if fields.raw("mlp_only_layers") else "decoder_sparse_step"
        raise UnsupportedModelError(f"{fields.describe(name)}; only models whose layers all have experts run here")
    mixture = _mixture(
        fields,
        count="num_local_experts" if "num_local_experts" in fields else "num_experts",
        size=fields.whole("moe_intermediate_size"),
        is_normalised=fields.flag("norm_topk_prob", default=False),
    )
    return {**_qwen3_parts(fields, spec), "mixture": mixture}


def _mixtral_parts(fields: Fields, spec: ModelSpec) -> Parts:
    mixture = _mixture(fields, count="num_local_experts", size=spec.intermediate_size, is_normalised=True)
    return {**_rope(fields.with_defaults({"rope_theta": 1_000_000.0}), spec), "mixture": mixture}


def _mixture(fields: Fields, *, count: str, size: int, is_normalised: bool) -> Mixture:
    num_experts, num_active = fields.whole(count), fields.whole("num_experts_per_tok")
    if num_active > num_experts:
        raise fields.error("num_experts_per_tok", f"is {num_active}, more than the {num_experts} experts there are")
    return Mixture(num_experts=num_experts, num_active=num_active, expert_size=size, is_normalised=is_normalised)


def _gpt2_parts(_fields: Fields, _spec: ModelSpec) -> Parts:
    return {
        "has_layer_norm": True,
        "has_learned_positions": True,
        "has_fused_qkv": True,
        "has_gate": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }


def _bigcode_parts(fields: Fields, spec: ModelSpec) -> Parts:
    if not fields.flag("multi_query", default=True):
        raise UnsupportedModelError(f"{fields.describe('multi_query')}; only models with one key-value head run here")
    return {**_gpt2_parts(fields, spec), "num_kv_heads": 1}


def _phi3_parts(fields: Fields, spec: ModelSpec) -> Parts:
    parts: Parts = {"has_fused_qkv": True, "has_fused_gate_up": True}
    rope = rope_from_hf(
        fields.values, fields.where, head_dim=spec.head_dim, max_position=spec.max_position, may_be_partial=True
    )
    if rope.kind == "longrope":
        # Beyond this the long factors would count, also for the tokens before it: another rotation of the same text.
        parts["max_position"] = rope.original_max_position
    return {**parts, "rope": rope}


def _olmo2_parts(fields: Fields, spec: ModelSpec) -> Parts:
    has_bias = fields.flag("attention_bias", default=False)
    return {
        **_rope(fields, spec),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": True,
        "qk_norm_spans_heads": True,
        "norm_places": "after",
    }


def _gemma_parts(fields: Fields, spec: ModelSpec) -> Parts:
    if fields.flag("attention_bias", default=False):
        raise UnsupportedModelError(f"{fields.describe('attention_bias')}, which is not implemented for Gemma")
    return {
        "norm_places": "both",
        "embed_scale": spec.hidden_size**0.5,
        "attention_scale": fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _gemma2_parts(fields: Fields, spec: ModelSpec) -> Parts:
    return {
        **_gemma_parts(fields, spec),
        **_rope(fields, spec),
        "attention_softcap": _cap(fields, "attn_logit_softcapping", default=50.0),
        "logits_softcap": _cap(fields, "final_logit_softcapping", default=30.0),
    }


def _gemma3_parts(fields: Fields, spec: ModelSpec) -> Parts:
    if "attn_logit_softcapping" in fields:
        # The field is left from Gemma 2, and transformers does not look at it; whoever sets it means something else.
        raise UnsupportedModelError(f"{fields.describe('attn_logit_softcapping')}, but Gemma 3 has no such cap")
    read = partial(rope_from_hf, where=fields.where, head_dim=spec.head_dim, max_position=spec.max_position)
    both = fields.raw("rope_parameters")
    if isinstance(both, Mapping) and "full_attention" in both:
        outer = {name: fields.raw(name) for name in fields.names if name != "rope_parameters"}
        rope, local = (
            read({**outer, "rope_parameters": both.get(kind)}) for kind in ("full_attention", "sliding_attention")
        )
    else:
        rope = read({"rope_theta": 1_000_000.0, **fields.values})
        local = read({"rope_theta": fields.positive("rope_local_base_freq", 10_000.0)})
    return {
        **_gemma_parts(fields, spec),
        "logits_softcap": _cap(fields, "final_logit_softcapping", default=0.0),
        "qk_norm": True,
        "rope": rope,
        "local_rope": local,
    }


def _cap(fields: Fields, name: str, *, default: float) -> float:
    """Return a cap; `null` is how files say that there is none."""
    if name in fields:
        return fields.positive(name)
    return 0.0 if name in fields.names else default


# --- windows ----------------------------------------------------------------------------------------------------------


def _no_windows(_fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _llama_windows(fields: Fields, num_layers: int) -> Windows:
    if "sliding_window" in fields:
        raise UnsupportedModelError(f"{fields.describe('sliding_window')}, but Llama layers have no window")
    return _by_layer_type(fields, num_layers, None, (False,) * num_layers)


def _mistral_windows(fields: Fields, num_layers: int) -> Windows:
    # Without the field the family's default counts; `null` is how later files say that there is no window.
    window = None if _is_null_window(fields) else fields.whole("sliding_window", 4096)
    return _by_layer_type(fields, num_layers, window, (window is not None,) * num_layers)


def _qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """Qwen files carry window fields that `use_sliding_window` switches off; windowed layers are the last ones."""
    window = _switched_window(fields)
    if window is None:
        return _by_layer_type(fields, num_layers, None, (False,) * num_layers)
    first = fields.whole("max_window_layers", 28, minimum=0)
    return _by_layer_type(fields, num_layers, window, tuple(layer >= first for layer in range(num_layers)))


def _qwen_moe_windows(fields: Fields, num_layers: int) -> Windows:
    """As `_qwen_windows`, but all layers or none: `max_window_layers` is in files, and nothing looks at it."""
    window = _switched_window(fields)
    return _by_layer_type(fields, num_layers, window, (window is not None,) * num_layers)


def _switched_window(fields: Fields) -> int | None:
    """Return the window where `use_sliding_window` says that there is one; the family has one without the field."""
    if not fields.flag("use_sliding_window", default=False):
        return None
    return None if _is_null_window(fields) else fields.whole("sliding_window", 4096)


def _is_null_window(fields: Fields) -> bool:
    return "sliding_window" in fields.names and "sliding_window" not in fields


def _by_layer_type(fields: Fields, num_layers: int, window: int | None, is_windowed: tuple[bool, ...]) -> Windows:
    """Return each layer's window; a list `layer_types`, where the file has one, must say the same."""
    types = fields.raw("layer_types")
    if types is not None:
        expected = ["sliding_attention" if windowed else "full_attention" for windowed in is_windowed]
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.error("layer_types", f"is not a list of {num_layers} names, one a layer")
        for layer, (found, wanted) in enumerate(zip(types, expected, strict=True)):
            if found not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(
                    f"{fields.where}: layer_types[{layer}] is {found!r}, a layer that is not implemented"
                )
            if found != wanted:
                raise UnsupportedModelError(
                    f"{fields.where}: layer_types[{layer}] is {found!r}, but the other window fields make it {wanted!r}"
                )
    return tuple(window if windowed else None for windowed in is_windowed)


def _optional_windows(fields: Fields, num_layers: int) -> Windows:
    window = fields.whole("sliding_window") if "sliding_window" in fields else None
    return _by_layer_type(fields, num_layers, window, (window is not None,) * num_layers)


def _gemma2_windows(fields: Fields, num_layers: int) -> Windows:
    """Every other layer sees a window, the first one too."""
    window = _gemma_window(fields)
    return _by_layer_type(fields, num_layers, window, tuple(layer % 2 == 0 for layer in range(num_layers)))


def _gemma3_windows(fields: Fields, num_layers: int) -> Windows:
    """One layer in six sees everything, or what `layer_types` says."""
    window = _gemma_window(fields)
    types = fields.raw("layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return _by_layer_type(fields, num_layers, window, tuple(each == "sliding_attention" for each in types))
    period = fields.whole("sliding_window_pattern", 6)
    return _by_layer_type(fields, num_layers, window, tuple((layer + 1) % period != 0 for layer in range(num_layers)))


def _gemma_window(fields: Fields) -> int:
    if _is_null_window(fields):
        raise fields.error("sliding_window", "is null", because="layers of this family have a window")
    return fields.whole("sliding_window", 4096)


_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
_GEMMA_READS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        name="llama", title="Llama", parts=_llama_parts, windows=_llama_windows, may_omit_kv_heads=True
    ),
    "MistralForCausalLM": Family(name="mistral", title="Mistral", parts=_rope, windows=_mistral_windows),
    "Qwen2ForCausalLM": Family(name="qwen2", title="Qwen2", parts=_qwen2_parts, windows=_qwen_windows),
    "Qwen3ForCausalLM": Family(
        name="qwen3", title="Qwen3", parts=_qwen3_parts, windows=_qwen_windows, needs_head_dim=True
    ),
    "Qwen3MoeForCausalLM": Family(
        name="qwen3_moe",
        title="Qwen3-MoE",
        parts=_qwen3_moe_parts,
        windows=_qwen_moe_windows,
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
    "MixtralForCausalLM": Family(
        name="mixtral",
        title="Mixtral",
        parts=_mixtral_parts,
        windows=_optional_windows,
        reads=frozenset({"num_local_experts"}),
        default_eps=1e-5,
    ),
    "Phi3ForCausalLM": Family(
        name="phi3",
        title="Phi-3",
        parts=_phi3_parts,
        windows=_optional_windows,
        reads=frozenset({"partial_rotary_factor"}),
        default_eps=1e-5,
        may_omit_kv_heads=True,
    ),
    "Olmo2ForCausalLM": Family(
        name="olmo2",
        title="OLMo 2",
        parts=_olmo2_parts,
        windows=_no_windows,
        default_eps=1e-5,
        may_omit_kv_heads=True,
    ),
    "Gemma2ForCausalLM": Family(
        name="gemma2",
        title="Gemma 2",
        parts=_gemma2_parts,
        windows=_gemma2_windows,
        reads=_GEMMA_READS,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        ties_embeddings=True,
        needs_head_dim=True,
    ),
    "Gemma3ForCausalLM": Family(
        name="gemma3",
        title="Gemma 3",
        parts=_gemma3_parts,
        windows=_gemma3_windows,
        reads=_GEMMA_READS,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        ties_embeddings=True,
        needs_head_dim=True,
    ),
    "GPT2LMHeadModel": Family(
        name="gpt2",
        title="GPT-2",
        parts=_gpt2_parts,
        windows=_no_windows,
        renames=_GPT2_NAMES,
        default_activation="gelu_new",
        default_inner=4,
        default_eps=1e-5,
        ties_embeddings=True,
        may_omit_kv_heads=True,
    ),
    "GPTBigCodeForCausalLM": Family(
        name="gpt_bigcode",
        title="GPT-BigCode",
        parts=_bigcode_parts,
        windows=_no_windows,
        renames=_GPT2_NAMES,
        default_activation="gelu_pytorch_tanh",
        default_inner=4,
        default_eps=1e-5,
        ties_embeddings=True,
        may_omit_kv_heads=True,
    ),
}
