"""Latent attention (DeepSeek's MLA): one compressed vector stands for the keys and values of all heads of a layer.

What is cached is `kv_lora_rank + qk_rope_head_dim` elements, once, whatever the number of heads; tensor parallelism
does not divide it. An indexer for sparse attention keeps a small key of its own beside it.
"""

from __future__ import annotations

from octavo.models.fields import Fields
from octavo.models.shape import Layer, LayerKV
from octavo.models.shapes.decoder import PRE_NORMS
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.mixture import dense_then_experts
from octavo.models.shapes.parts import add_gated_mlp
from octavo.units import cdiv

# An index key is held in 8 bits, with a float32 scale for every so many elements.
_INDEX_SCALE_GROUP = 128


def draft_deepseek(fields: Fields) -> ShapeDraft:
    """DeepSeek V2, V3 and R1, Kimi K2: latent attention, dense layers first, then experts with shared ones.

    `num_nextn_predict_layers` is not counted: the extra layer is a draft model that serving leaves out by default.
    """
    draft = ShapeDraft(fields)
    # The router of V3 has a correction bias per expert; that of V2 has not (`topk_method` says which).
    has_correction = fields.text("topk_method", "noaux_tc") == "noaux_tc" and "DeepseekV2" not in _architecture(fields)
    return _latent_decoder(draft, has_correction=has_correction)


def draft_deepseek_sparse(fields: Fields) -> ShapeDraft:
    """DeepSeek V3.2 and GLM 5: as V3, with an indexer in every layer that picks the tokens to attend."""
    return _latent_decoder(ShapeDraft(fields), has_correction=True, has_indexer=True)


def draft_mistral4(fields: Fields) -> ShapeDraft:
    """Mistral Small 4: as DeepSeek V2, without a correction of the router."""
    return _latent_decoder(ShapeDraft(fields), has_correction=False)


def draft_minicpm3(fields: Fields) -> ShapeDraft:
    """MiniCPM 3: latent attention in a dense model, with a tied head."""
    return _latent_decoder(ShapeDraft(fields), has_correction=False, is_tied_by_default=True)


def add_latent_attention(draft: ShapeDraft, layer: int, *, has_indexer: bool = False) -> Layer:
    """Count one layer's projections to and from the latent vector; return what it keeps."""
    fields, hidden, heads = draft.fields, draft.hidden_size, draft.num_heads
    latent, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim")
    nope, value = fields.whole("qk_nope_head_dim"), fields.whole("v_head_dim")
    has_bias = fields.flag("attention_bias", default=False)
    query_rank = fields.whole("q_lora_rank") if "q_lora_rank" in fields else 0
    query_rows = heads * (nope + rope)
    if query_rank:
        draft.linear("layers.*.q_a_proj", "attention", query_rank, hidden, layer=layer, has_bias=has_bias)
        draft.norm("layers.*.q_a_layernorm", query_rank, layer=layer)
        draft.linear("layers.*.q_b_proj", "attention", query_rows, query_rank, layer=layer, num_shards=heads)
    else:
        draft.linear("layers.*.q_proj", "attention", query_rows, hidden, layer=layer, num_shards=heads)
    draft.linear("layers.*.kv_a_proj", "attention", latent + rope, hidden, layer=layer, has_bias=has_bias)
    draft.norm("layers.*.kv_a_layernorm", latent, layer=layer)
    draft.linear("layers.*.kv_b_proj", "attention", heads * (nope + value), latent, layer=layer, num_shards=heads)
    draft.linear(
        "layers.*.o_proj",
        "attention",
        hidden,
        heads * value,
        layer=layer,
        num_shards=heads,
        bias_shards=1,
        has_bias=has_bias,
    )
    index_bytes = _add_indexer(draft, layer, query_rank) if has_indexer else 0
    kv = LayerKV(
        kind="latent",
        num_kv_heads=1,
        key_dim=latent + rope,
        value_dim=0,
        index_bytes=index_bytes,
        rope_dim=rope,
        expanded_dim=nope + rope,
    )
    return Layer(kv=kv)


def _add_indexer(draft: ShapeDraft, layer: int, query_rank: int) -> int:
    """Count an indexer; return the bytes of its key for one token."""
    heads, width = draft.fields.whole("index_n_heads"), draft.fields.whole("index_head_dim")
    draft.linear("layers.*.indexer.wq_b", "attention", heads * width, query_rank, layer=layer)
    draft.linear("layers.*.indexer.wk", "attention", width, draft.hidden_size, layer=layer)
    draft.norm("layers.*.indexer.k_norm", width, layer=layer, has_bias=True)
    draft.add("layers.*.indexer.weights_proj.weight", "attention", heads, draft.hidden_size, layer=layer)
    return index_key_bytes(width)


def index_key_bytes(width: int) -> int:
    """Return the bytes of one index key of `width` elements."""
    return width + 4 * cdiv(width, _INDEX_SCALE_GROUP)


def _latent_decoder(
    draft: ShapeDraft, *, has_correction: bool, has_indexer: bool = False, is_tied_by_default: bool = False
) -> ShapeDraft:
    fields = draft.fields
    is_mixture = any(name in fields for name in ("n_routed_experts", "num_experts"))
    mlp = (
        dense_then_experts(fields, has_correction=has_correction)
        if is_mixture
        else lambda draft, layer: add_gated_mlp(draft, layer, fields.whole("intermediate_size"))
    )
    draft.embedding()
    for layer in range(draft.num_layers):
        draft.layers.append(add_latent_attention(draft, layer, has_indexer=has_indexer))
        mlp(draft, layer)
        for name in PRE_NORMS:
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
    draft.norm("norm", draft.hidden_size)
    draft.head(is_tied=fields.flag("tie_word_embeddings", default=is_tied_by_default))
    return draft


def _architecture(fields: Fields) -> str:
    return str(fields.raw("architectures"))
