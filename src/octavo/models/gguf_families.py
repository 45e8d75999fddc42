"""Families in GGUF files: what sets each apart, as metadata and tensors say it, or as the format takes for granted.

The counterpart of `families.py`. A GGUF file leaves out what its readers know about a family: the pattern of windows,
the scale of embeddings, whether an MLP has a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.names import gguf_name
from octavo.models.spec import Mixture, ModelSpec, Rope

Windows = tuple[int | None, ...]
Tensors = Mapping[str, object]
Parts = dict[str, Any]
"""Fields of `ModelSpec` and their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """What sets one `general.architecture` apart.

    Args:
        name: In specs, the same as for a folder of the family.
        parts: Reads what only this family has, given what all have and the names of the file's tensors.
        windows: Reads each layer's window.
        reads: Fields that `parts` reads, and that would otherwise be refused as unknown arithmetic.
        eps_field: Where the small number of norms is.
    """

    name: str
    parts: Callable[[Fields, ModelSpec, Tensors], Parts]
    windows: Callable[[Fields, int], Windows]
    reads: frozenset[str] = frozenset()
    eps_field: str = "attention.layer_norm_rms_epsilon"


# --- parts ------------------------------------------------------------------------------------------------------------


def _biases(_fields: Fields, _spec: ModelSpec, tensors: Tensors) -> Parts:
    return {
        "qkv_bias": gguf_name("layers.0.q_bias") in tensors,
        "output_bias": gguf_name("layers.0.o_bias") in tensors,
        "mlp_bias": gguf_name("layers.0.gate_bias") in tensors,
        "qk_norm": gguf_name("layers.0.q_norm") in tensors,
    }


def _llama(fields: Fields, spec: ModelSpec, tensors: Tensors) -> Parts:
    parts = _biases(fields, spec, tensors)
    if fields.whole("expert_count", 0, minimum=0):
        # Files of the Mixtral family; its experts are as wide as the MLP they stand for.
        mixture = _mixture(fields, size=spec.intermediate_size, is_normalised=True)
        return {**parts, "architecture": "mixtral", "mixture": mixture}
    return parts


def _qwen3_moe(fields: Fields, spec: ModelSpec, tensors: Tensors) -> Parts:
    mixture = _mixture(
        fields,
        size=fields.whole("expert_feed_forward_length"),
        is_normalised=fields.flag("expert_weights_norm", default=True),
    )
    return {**_biases(fields, spec, tensors), "mixture": mixture}


def _mixture(fields: Fields, *, size: int, is_normalised: bool) -> Mixture:
    for name in ("expert_shared_count", "leading_dense_block_count"):
        if fields.whole(name, 0, minimum=0):
            raise UnsupportedModelError(f"{fields.describe(name)}, which is not implemented")
    num_experts, num_active = fields.whole("expert_count"), fields.whole("expert_used_count")
    if num_active > num_experts:
        raise fields.error("expert_used_count", f"is {num_active}, more than the {num_experts} experts there are")
    return Mixture(num_experts=num_experts, num_active=num_active, expert_size=size, is_normalised=is_normalised)


def _gpt2(_fields: Fields, _spec: ModelSpec, _tensors: Tensors) -> Parts:
    return {
        "rope": Rope(kind="none"),
        "has_layer_norm": True,
        "has_learned_positions": True,
        "has_fused_qkv": True,
        "has_gate": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "activation": "gelu_tanh",
    }


def _phi3(_fields: Fields, _spec: ModelSpec, tensors: Tensors) -> Parts:
    if "rope_factors_short.weight" in tensors:
        raise UnsupportedModelError(
            "rope_factors_short.weight: rotary factors in a GGUF file of Phi-3 are not read",
            hints=("use the model's folder with safetensors",),
        )
    return {"has_fused_qkv": True, "has_fused_gate_up": True}


def _olmo2(fields: Fields, spec: ModelSpec, tensors: Tensors) -> Parts:
    return {**_biases(fields, spec, tensors), "qk_norm": True, "qk_norm_spans_heads": True, "norm_places": "after"}


def _gemma(spec: ModelSpec, *, layers_of_27b: int) -> Parts:
    # The largest model of each generation divides scores by another width, and files do not say so.
    is_27b = spec.num_layers == layers_of_27b
    width = spec.hidden_size / spec.num_heads if is_27b else spec.head_dim
    return {
        "activation": "gelu_tanh",
        "norm_places": "both",
        "embed_scale": spec.hidden_size**0.5,
        "attention_scale": width**-0.5,
    }


def _gemma2(fields: Fields, spec: ModelSpec, _tensors: Tensors) -> Parts:
    return {
        **_gemma(spec, layers_of_27b=46),
        "attention_softcap": _cap(fields, "attn_logit_softcapping", default=50.0),
        "logits_softcap": _cap(fields, "final_logit_softcapping", default=30.0),
    }


def _gemma3(fields: Fields, spec: ModelSpec, _tensors: Tensors) -> Parts:
    local = Rope(theta=fields.positive("rope.freq_base_swa", 10_000.0), rotary_dim=spec.head_dim)
    return {
        **_gemma(spec, layers_of_27b=62),
        "logits_softcap": _cap(fields, "final_logit_softcapping", default=0.0),
        "qk_norm": True,
        "local_rope": local,
    }


def _cap(fields: Fields, name: str, *, default: float) -> float:
    return fields.positive(name, default or None) if fields.number(name, default) else 0.0


# --- windows ----------------------------------------------------------------------------------------------------------


def _one_window(fields: Fields, num_layers: int) -> Windows:
    window = fields.whole("attention.sliding_window", 0, minimum=0)
    return (window or None,) * num_layers


def _no_windows(_fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _olmo2_windows(fields: Fields, num_layers: int) -> Windows:
    if fields.whole("attention.sliding_window", 0, minimum=0):
        # Files of OLMo 3 call themselves olmo2, and have windows in three layers of four.
        raise UnsupportedModelError(f"{fields.describe('attention.sliding_window')}, but OLMo 2 has no windows")
    return (None,) * num_layers


def _windows_but_each(period: int) -> Callable[[Fields, int], Windows]:
    """Every `period`-th layer sees everything, the others a window."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = fields.whole("attention.sliding_window")
        is_full = [(layer + 1) % period == 0 for layer in range(num_layers)]
        pattern = fields.raw("attention.sliding_window_pattern")
        if pattern not in (None, period) and pattern != [not each for each in is_full]:
            raise UnsupportedModelError(
                f"{fields.describe('attention.sliding_window_pattern')}; only a full layer in {period} is implemented"
            )
        return tuple(None if each else window for each in is_full)

    return windows


_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(name="llama", parts=_llama, windows=_one_window, reads=frozenset({"expert_count"})),
    "qwen2": GgufFamily(name="qwen2", parts=_biases, windows=_one_window),
    "qwen3": GgufFamily(name="qwen3", parts=_biases, windows=_one_window),
    "qwen3moe": GgufFamily(name="qwen3_moe", parts=_qwen3_moe, windows=_no_windows, reads=frozenset({"expert_count"})),
    "gpt2": GgufFamily(name="gpt2", parts=_gpt2, windows=_no_windows, eps_field="attention.layer_norm_epsilon"),
    "starcoder": GgufFamily(
        name="gpt_bigcode", parts=_gpt2, windows=_no_windows, eps_field="attention.layer_norm_epsilon"
    ),
    "phi3": GgufFamily(name="phi3", parts=_phi3, windows=_one_window),
    "olmo2": GgufFamily(name="olmo2", parts=_olmo2, windows=_olmo2_windows),
    "gemma2": GgufFamily(name="gemma2", parts=_gemma2, windows=_windows_but_each(2), reads=_CAPS),
    "gemma3": GgufFamily(
        name="gemma3", parts=_gemma3, windows=_windows_but_each(6), reads=frozenset({"final_logit_softcapping"})
    ),
}
