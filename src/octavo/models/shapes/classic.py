"""Families of the GPT plan: LayerNorms with biases, an MLP without gate, learned positions in the older ones."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shapes.decoder import head_dim_of, inner_width, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.parts import Attention, add_attention, add_plain_mlp


def draft_gpt2(fields: Fields) -> ShapeDraft:
    """GPT-2, and GPT-3 by its published sizes."""
    draft = ShapeDraft(fields)
    return _classic(draft, num_kv_heads=draft.num_heads, num_positions=draft.max_position)


def draft_gpt_bigcode(fields: Fields) -> ShapeDraft:
    """StarCoder 1 and SantaCoder: GPT-2 with one KV head for all query heads."""
    draft = ShapeDraft(fields)
    is_shared = fields.flag("multi_query", default=True)
    return _classic(draft, num_kv_heads=1 if is_shared else draft.num_heads, num_positions=draft.max_position)


def draft_opt(fields: Fields) -> ShapeDraft:
    """OPT: two more positions than tokens, as its first two are padding."""
    draft = ShapeDraft(fields)
    width = fields.whole("word_embed_proj_dim", draft.hidden_size)
    if width != draft.hidden_size or not fields.flag("do_layer_norm_before", default=True):
        # Only OPT-350m: its embeddings are narrower, and its norms come after.
        raise UnsupportedModelError(f"{fields.describe('word_embed_proj_dim')}, a plan that cannot be counted")
    return _classic(draft, num_kv_heads=draft.num_heads, num_positions=draft.max_position + 2)


def draft_bloom(fields: Fields) -> ShapeDraft:
    """BLOOM: ALiBi instead of positions, a norm behind the embedding."""
    draft = ShapeDraft(fields, default_max_position=2048)
    draft.norm("embed_norm", draft.hidden_size, has_bias=True)
    return _classic(draft, num_kv_heads=draft.num_heads)


def draft_gpt_neox(fields: Fields) -> ShapeDraft:
    """GPT-NeoX and Pythia: rotary positions, a head of its own."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=True)
    return _classic(draft, num_kv_heads=draft.num_heads, has_attention_bias=has_bias, is_tied_by_default=False)


def draft_gptj(fields: Fields) -> ShapeDraft:
    """GPT-J: one norm a layer, attention and MLP side by side, no biases in attention, a bias on the head."""
    draft = ShapeDraft(fields)
    return _classic(
        draft,
        num_kv_heads=draft.num_heads,
        has_attention_bias=False,
        layer_norms=("ln_1",),
        is_tied_by_default=False,
        has_head_bias=True,
    )


def draft_phi(fields: Fields) -> ShapeDraft:
    """Phi 1 and 2: one norm a layer, attention and MLP side by side, a bias on the head."""
    draft = ShapeDraft(fields)
    return _classic(
        draft,
        num_kv_heads=num_kv_heads_of(draft),
        layer_norms=("input_layernorm",),
        is_tied_by_default=False,
        has_head_bias=True,
    )


def draft_falcon(fields: Fields) -> ShapeDraft:
    """Falcon: one KV head (7B), or a group of them with two norms a layer (40B, 180B); biases only where said."""
    draft = ShapeDraft(fields, default_max_position=2048)
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_shared = fields.flag("multi_query", default=True)
    if is_new:
        num_kv_heads = num_kv_heads_of(draft)
        num_norms = fields.whole("num_ln_in_parallel_attn", 2)
        norms = ("ln_attn", "ln_mlp")[:num_norms]
    else:
        num_kv_heads = 1 if is_shared else draft.num_heads
        is_parallel = fields.flag("parallel_attn", default=True)
        norms = ("input_layernorm",) if is_parallel else ("input_layernorm", "post_attention_layernorm")
    has_bias = fields.flag("bias", default=False)
    return _classic(
        draft, num_kv_heads=num_kv_heads, has_attention_bias=has_bias, has_mlp_bias=has_bias, layer_norms=norms
    )


def _classic(
    draft: ShapeDraft,
    *,
    num_kv_heads: int,
    num_positions: int = 0,
    has_attention_bias: bool = True,
    has_mlp_bias: bool = True,
    layer_norms: tuple[str, ...] = ("ln_1", "ln_2"),
    is_tied_by_default: bool = True,
    has_head_bias: bool = False,
) -> ShapeDraft:
    fields, hidden = draft.fields, draft.hidden_size
    draft.embedding("wte")
    if num_positions:
        draft.add("wpe.weight", "other", num_positions, hidden)
    attention = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim_of(draft),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
    )
    for layer in range(draft.num_layers):
        draft.layers.append(add_attention(draft, layer, attention))
        add_plain_mlp(draft, layer, inner_width(fields, hidden), has_bias=has_mlp_bias)
        for name in layer_norms:
            draft.norm(f"layers.*.{name}", hidden, layer=layer, has_bias=True)
    draft.norm("ln_f", hidden, has_bias=True)
    draft.head(is_tied=fields.flag("tie_word_embeddings", default=is_tied_by_default), has_bias=has_head_bias)
    return draft
