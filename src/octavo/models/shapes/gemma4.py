"""Gemma 4: full layers with wider heads than sliding ones, keys that serve as values, experts beside a dense MLP."""

from __future__ import annotations

from octavo.models.fields import Fields
from octavo.models.shape import Layer
from octavo.models.shapes.decoder import SANDWICH_NORMS, head_dim_of, inner_width, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft, first_whole
from octavo.models.shapes.layer_windows import alternating_windows
from octavo.models.shapes.parts import Attention, add_attention, add_experts, add_gated_mlp

# Experts that a token uses, in files older than the field.
_DEFAULT_TOP_K = 8


def draft_gemma4(fields: Fields) -> ShapeDraft:
    """Count the text part.

    The last `num_kv_shared_layers` layers read the cache of an earlier layer: they have no k and v and keep nothing.
    """
    draft = ShapeDraft(fields)
    # The last layer sees all, whatever a list of kinds says of it.
    windows = (*alternating_windows(draft, period=6, default=512)[:-1], None)
    sliding, full = _attentions(draft, window=fields.whole("sliding_window", 512))
    is_mixture = fields.flag("enable_moe_block", default="num_experts" in fields)
    num_shared = fields.whole("num_kv_shared_layers", 0, minimum=0)
    extra_width = fields.whole("hidden_size_per_layer_input", 0, minimum=0)
    draft.embedding()
    for layer, window in enumerate(windows):
        attention = full if window is None else sliding
        if layer >= draft.num_layers - num_shared:
            _add_reading_attention(draft, layer, attention)
            draft.layers.append(Layer())
        else:
            draft.layers.append(add_attention(draft, layer, attention))
        is_wide = fields.flag("use_double_wide_mlp", default=False) and layer >= draft.num_layers - num_shared
        add_gated_mlp(draft, layer, inner_width(fields, draft.hidden_size) * (2 if is_wide else 1))
        for name in SANDWICH_NORMS:
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
        draft.add("layers.*.layer_scalar", "other", 1, 1, layer=layer)
        if extra_width:
            _add_layer_input(draft, layer, extra_width)
        if is_mixture:
            _add_mixture(draft, layer)
    if extra_width:
        width = draft.num_layers * extra_width
        rows = fields.whole("vocab_size_per_layer_input", draft.vocab_size)
        draft.add("embed_tokens_per_layer.weight", "embedding", rows, width, num_shards=rows)
        draft.linear("per_layer_model_projection", "other", width, draft.hidden_size)
        draft.norm("per_layer_projection_norm", extra_width)
    draft.norm("norm", draft.hidden_size)
    draft.head(is_tied=fields.flag("tie_word_embeddings", default=True))
    return draft


def _attentions(draft: ShapeDraft, *, window: int) -> tuple[Attention, Attention]:
    fields = draft.fields
    has_bias = fields.flag("attention_bias", default=False)
    head_dim, num_kv_heads = head_dim_of(draft), num_kv_heads_of(draft)
    global_dim = fields.whole("global_head_dim", 512)
    is_shared = fields.flag("attention_k_eq_v", default=False)
    global_heads = fields.whole("num_global_key_value_heads", num_kv_heads) if is_shared else num_kv_heads
    sliding = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm_widths=(head_dim, head_dim),
    )
    full = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=global_heads,
        head_dim=global_dim,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm_widths=(global_dim, global_dim),
        is_value_key=is_shared,
    )
    return sliding, full


def _add_reading_attention(draft: ShapeDraft, layer: int, attention: Attention) -> None:
    """Count the queries and the output of a layer that reads the keys and values of another."""
    heads, width = attention.num_heads, attention.num_heads * attention.head_dim
    bias = attention.has_qkv_bias
    draft.linear("layers.*.q_proj", "attention", width, draft.hidden_size, layer=layer, num_shards=heads, has_bias=bias)
    draft.norm("layers.*.q_norm", attention.head_dim, layer=layer)
    draft.linear(
        "layers.*.o_proj",
        "attention",
        draft.hidden_size,
        width,
        layer=layer,
        num_shards=heads,
        bias_shards=1,
        has_bias=attention.has_output_bias,
    )


def _add_layer_input(draft: ShapeDraft, layer: int, width: int) -> None:
    draft.linear("layers.*.per_layer_input_gate", "other", width, draft.hidden_size, layer=layer)
    draft.linear("layers.*.per_layer_projection", "other", draft.hidden_size, width, layer=layer)
    draft.norm("layers.*.post_per_layer_input_norm", draft.hidden_size, layer=layer)


def _add_mixture(draft: ShapeDraft, layer: int) -> None:
    fields = draft.fields
    num_experts = fields.whole("num_experts")
    add_experts(
        draft,
        layer,
        fields.whole("moe_intermediate_size"),
        num_experts=num_experts,
        num_active=first_whole(fields, ("top_k_experts", "num_experts_per_tok"), _DEFAULT_TOP_K),
    )
    draft.add("layers.*.router.scale", "router", 1, draft.hidden_size, layer=layer)
    draft.add("layers.*.router.per_expert_scale", "router", 1, num_experts, layer=layer)
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
