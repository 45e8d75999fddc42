"""Reads a Hugging Face `config.json` as a `ModelSpec`.

Sizes must be there. For fields that files of a family commonly leave out, the family's own default in transformers
counts: it is part of the format. Whatever would change the arithmetic and is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.rope_config import rope_from_hf
from octavo.models.spec import ModelSpec
from octavo.models.spec_checks import check_num_layers, complete_spec, derive_head_dim

_Windows = tuple[int | None, ...]

# Fields of other families that change the arithmetic, with the values that mean "off".
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "kv_lora_rank": (),
    "use_mrope": (False,),
    "no_rope_layers": (),
    "is_encoder_decoder": (False,),
}
_ACTIVATIONS = ("silu", "swish")  # two names of x / (1 + exp(-x))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    """Parts that some families have."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What sets one architecture apart: its name in specs, and how it reads the fields that only it has."""

    name: str
    flags: Callable[[Fields], _Flags]
    windows: Callable[[Fields, int], _Windows]


def spec_from_hf(config: Mapping[str, object], *, where: str, name: str) -> ModelSpec:
    """Read a configuration.

    Args:
        config: The parsed file.
        where: Start of the error messages: the file.
        name: Name of the model, for people.

    Raises:
        UnsupportedModelError: an architecture, activation, rotary scaling, layer type or field we do not run.
        ModelFileError: a field is missing or has an impossible value.
    """
    fields = Fields(config, where)
    family = _FAMILIES[_architecture(fields)]
    _refuse_other_arithmetic(fields)
    num_layers = check_num_layers(fields.whole("num_hidden_layers"), where=where)
    num_heads = fields.whole("num_attention_heads")
    hidden_size = fields.whole("hidden_size")
    max_position = fields.whole("max_position_embeddings")
    vocab_size = fields.whole("vocab_size")
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    flags = family.flags(fields)
    spec = ModelSpec(
        name=name,
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=rope_from_hf(config, where, head_dim=head_dim, max_position=max_position),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id", vocab_size))),
        qkv_bias=flags.qkv_bias,
        output_bias=flags.output_bias,
        mlp_bias=flags.mlp_bias,
        qk_norm=flags.qk_norm,
    )
    return complete_spec(spec, windows=family.windows(fields, num_layers), where=where)


def with_eos(spec: ModelSpec, *more: int) -> ModelSpec:
    """Return the spec with further end-of-sequence ids, each once, in the order they are named."""
    return replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *more))))


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "does not name exactly one architecture")
    if names[0] not in _FAMILIES:
        raise UnsupportedModelError(
            f"{fields.where}: architectures names {names[0]}, which is not implemented",
            because=f"the known ones are {', '.join(_FAMILIES)}",
        )
    return names[0]


def _refuse_other_arithmetic(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{fields.describe('hidden_act')}, an activation that is not implemented")
    if "quantization_config" in fields:
        method = fields.inner("quantization_config").raw("quant_method")
        raise UnsupportedModelError(
            f"{fields.where}: quantization_config.quant_method is {method!r}; quantised safetensors cannot be read",
            hints=("use the model's unquantised folder, or a GGUF file of it",),
        )
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields.raw(name) not in neutral:
            raise UnsupportedModelError(f"{fields.describe(name)}, which is not implemented")


def _head_dim(fields: Fields, family: _Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields:
        return fields.whole("head_dim")
    if family.name == "qwen3":
        raise fields.error("head_dim", "is missing", because="Qwen3 heads are not hidden_size / num_attention_heads")
    return derive_head_dim(hidden_size, num_heads, where=fields.where)


def _num_kv_heads(fields: Fields, family: _Family, num_heads: int) -> int:
    """Only files older than shared key-value heads leave the number out, and those are Llama files."""
    is_optional = family.name == "llama" or "num_key_value_heads" in fields.names
    return fields.whole("num_key_value_heads", num_heads if is_optional else None)


def _llama_flags(fields: Fields) -> _Flags:
    has_bias = fields.flag("attention_bias", default=False)
    return _Flags(qkv_bias=has_bias, output_bias=has_bias, mlp_bias=fields.flag("mlp_bias", default=False))


def _qwen3_flags(fields: Fields) -> _Flags:
    has_bias = fields.flag("attention_bias", default=False)
    return _Flags(qkv_bias=has_bias, output_bias=has_bias, qk_norm=True)


def _llama_windows(fields: Fields, num_layers: int) -> _Windows:
    if "sliding_window" in fields:
        raise UnsupportedModelError(f"{fields.describe('sliding_window')}, but Llama layers have no window")
    return _by_layer_type(fields, num_layers, None, (False,) * num_layers)


def _mistral_windows(fields: Fields, num_layers: int) -> _Windows:
    # Without the field the family's default counts; `null` is how later files say that there is no window.
    default = None if "sliding_window" in fields.names else 4096
    window = fields.whole("sliding_window", default) if default or "sliding_window" in fields else None
    return _by_layer_type(fields, num_layers, window, (window is not None,) * num_layers)


def _qwen_windows(fields: Fields, num_layers: int) -> _Windows:
    """Qwen files carry window fields that `use_sliding_window` switches off; windowed layers are the last ones."""
    if not fields.flag("use_sliding_window", default=False) or "sliding_window" not in fields:
        return _by_layer_type(fields, num_layers, None, (False,) * num_layers)
    first = fields.whole("max_window_layers", 28, minimum=0)
    window = fields.whole("sliding_window")
    return _by_layer_type(fields, num_layers, window, tuple(layer >= first for layer in range(num_layers)))


def _by_layer_type(fields: Fields, num_layers: int, window: int | None, is_windowed: tuple[bool, ...]) -> _Windows:
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


_FAMILIES = {
    "LlamaForCausalLM": _Family(name="llama", flags=_llama_flags, windows=_llama_windows),
    "MistralForCausalLM": _Family(name="mistral", flags=lambda _: _Flags(), windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family(name="qwen2", flags=lambda _: _Flags(qkv_bias=True), windows=_qwen_windows),
    "Qwen3ForCausalLM": _Family(name="qwen3", flags=_qwen3_flags, windows=_qwen_windows),
}
