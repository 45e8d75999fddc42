"""Reads a Hugging Face `config.json` as a `ModelSpec`.

Sizes must be there. For fields that files of a family commonly leave out, the family's own default in transformers
counts: it is part of the format. Whatever would change the arithmetic and is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.errors import UnsupportedModelError
from octavo.models.families import FAMILIES, Family
from octavo.models.fields import Fields
from octavo.models.spec import ActivationKind, ModelSpec, Rope
from octavo.models.spec_checks import check_num_layers, complete_spec, derive_head_dim

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
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_bidirectional_attention": (False,),
}
_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Names in files, several of them for the same function, to ours."""


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
    family = FAMILIES[_architecture(fields)]
    fields = family.renamed(fields)
    _refuse_other_arithmetic(fields, family)
    num_layers = check_num_layers(fields.whole("num_hidden_layers"), where=where)
    num_heads = fields.whole("num_attention_heads")
    hidden_size = fields.whole("hidden_size")
    vocab_size = fields.whole("vocab_size")
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    spec = ModelSpec(
        name=name,
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size", family.default_inner * hidden_size or None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, family, num_heads),
        head_dim=head_dim,
        max_position=fields.whole("max_position_embeddings"),
        norm_eps=fields.positive("rms_norm_eps", family.default_eps),
        rope=Rope(kind="none"),
        tie_embeddings=fields.flag("tie_word_embeddings", default=family.ties_embeddings),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id", vocab_size))),
        activation=_activation(fields, family),
    )
    spec = replace(spec, **family.parts(fields, spec))
    return complete_spec(spec, windows=family.windows(fields, num_layers), where=where)


def with_eos(spec: ModelSpec, *more: int) -> ModelSpec:
    """Return the spec with further end-of-sequence ids, each once, in the order they are named."""
    return replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *more))))


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "does not name exactly one architecture")
    if names[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"{fields.where}: architectures names {names[0]}, which is not implemented",
            because=f"the known ones are {', '.join(FAMILIES)}",
        )
    return names[0]


def _activation(fields: Fields, family: Family) -> ActivationKind:
    name = fields.text(family.activation_field, family.default_activation)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.describe(family.activation_field)}, an activation that is not implemented"
        )
    return _ACTIVATIONS[name]


def _refuse_other_arithmetic(fields: Fields, family: Family) -> None:
    if "quantization_config" in fields:
        method = fields.inner("quantization_config").raw("quant_method")
        raise UnsupportedModelError(
            f"{fields.where}: quantization_config.quant_method is {method!r}; quantised safetensors cannot be read",
            hints=("use the model's unquantised folder, or a GGUF file of it",),
        )
    for name, neutral in _NEUTRAL.items():
        if name in fields and name not in family.reads and fields.raw(name) not in neutral:
            raise UnsupportedModelError(f"{fields.describe(name)}, which is not implemented")


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields:
        return fields.whole("head_dim")
    if family.needs_head_dim:
        raise fields.error(
            "head_dim", "is missing", because=f"{family.title} heads are not hidden_size / num_attention_heads"
        )
    return derive_head_dim(hidden_size, num_heads, where=fields.where)


def _num_kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    """Only families older than shared key-value heads leave the number out."""
    is_optional = family.may_omit_kv_heads or "num_key_value_heads" in fields.names
    return fields.whole("num_key_value_heads", num_heads if is_optional else None)
