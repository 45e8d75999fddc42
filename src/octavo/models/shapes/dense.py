"""Families of the Llama plan: rotary positions, RMS norms, a gated MLP in every layer; windows and biases differ."""

from __future__ import annotations

from octavo.models.fields import Fields
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.layer_windows import qwen_windows, sliding_windows
from octavo.models.shapes.parts import Attention, add_attention, add_gated_mlp


def head_dim_of(draft: ShapeDraft) -> int:
    """Return the width of a head: its own field, else the hidden size shared by the heads."""
    fields = draft.fields
    if "head_dim" in fields:
        return fields.whole("head_dim")
    if draft.hidden_size % draft.num_heads:
        raise fields.error("hidden_size", f"does not divide into {draft.num_heads} heads")
    return draft.hidden_size // draft.num_heads


def num_kv_heads_of(draft: ShapeDraft) -> int:
    """Return the heads that are cached: all, where the file does not say that they are shared."""
    return draft.fields.whole("num_key_value_heads", draft.num_heads)


def draft_llama(fields: Fields) -> ShapeDraft:
    """Llama, and what is stored as Llama: Yi, CodeLlama, TinyLlama, SmolLM2, distilled models."""
    has_bias = fields.flag("attention_bias", default=False)
    draft = ShapeDraft(fields)
    return _draft(
        draft,
        windows=(None,) * draft.num_layers,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def draft_mistral(fields: Fields) -> ShapeDraft:
    """Mistral: a window in every layer of the first release, none since."""
    draft = ShapeDraft(fields)
    default = None if "sliding_window" in fields.names else 4096  # the default of its configuration class
    window = fields.whole("sliding_window", default) if default or "sliding_window" in fields else None
    return _draft(draft, windows=sliding_windows(draft, window))


def draft_qwen2(fields: Fields) -> ShapeDraft:
    """Qwen 1.5, 2 and 2.5: biases on q, k and v."""
    draft = ShapeDraft(fields)
    return _draft(draft, windows=qwen_windows(draft), qkv_bias=True)


def draft_qwen3(fields: Fields) -> ShapeDraft:
    """Qwen 3: norms on the heads of q and k instead of biases."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    if "head_dim" not in fields:
        raise fields.error("head_dim", "is missing", because="Qwen3 heads are not hidden_size / num_attention_heads")
    return _draft(draft, windows=qwen_windows(draft), qkv_bias=has_bias, output_bias=has_bias, has_qk_norm=True)


def _draft(
    draft: ShapeDraft,
    *,
    windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    has_qk_norm: bool = False,
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    is_tied_by_default: bool = False,
) -> ShapeDraft:
    fields, head_dim = draft.fields, head_dim_of(draft)
    draft.embedding()
    for layer, window in enumerate(windows):
        attention = Attention(
            num_heads=draft.num_heads,
            num_kv_heads=num_kv_heads_of(draft),
            head_dim=head_dim,
            window=window,
            has_qkv_bias=qkv_bias,
            has_output_bias=output_bias,
            qk_norm_widths=(head_dim, head_dim) if has_qk_norm else (),
        )
        draft.layers.append(add_attention(draft, layer, attention))
        add_gated_mlp(draft, layer, fields.whole("intermediate_size"), has_bias=mlp_bias)
        for name in layer_norms:
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
    draft.norm("norm", draft.hidden_size)
    draft.head(is_tied=fields.flag("tie_word_embeddings", default=is_tied_by_default))
    return draft
