"""DeepSeek V4: a short window of whole tokens in every layer, and beside it entries that stand for many tokens each.

`compress_ratios` says how many: 4 with an indexer, 128 without, 0 for layers with the window alone.
"""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shape import Layer, LayerKV
from octavo.models.shapes.decoder import PRE_NORMS, head_dim_of
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.latent import index_key_bytes
from octavo.models.shapes.mixture import num_active_of, num_experts_of
from octavo.models.shapes.parts import add_experts, add_gated_mlp

# Entries of one layer in four overlap: each is made from two windows, so its projections are twice as wide.
_INDEXED_RATIO = 4
_KNOWN_RATIOS = (0, _INDEXED_RATIO, 128)


def draft_deepseek_v4(fields: Fields) -> ShapeDraft:
    """Count the model; `num_nextn_predict_layers` is a draft model, which serving leaves out by default.

    Routers of the first `num_hash_layers` look experts up by token; the others have a correction bias.
    """
    draft = ShapeDraft(fields)
    ratios = _ratios(draft)
    num_hash_layers = fields.whole("num_hash_layers", 3, minimum=0)
    width, num_experts, num_active = (
        fields.whole("moe_intermediate_size"),
        num_experts_of(fields),
        num_active_of(fields),
    )
    num_shared = fields.whole("n_shared_experts", 1, minimum=0)
    streams = fields.whole("hc_mult", 4)
    mixed = streams * draft.hidden_size
    draft.embedding()
    for layer, ratio in enumerate(ratios):
        draft.layers.append(_add_attention(draft, layer, ratio))
        add_experts(
            draft,
            layer,
            width,
            num_experts=num_experts,
            num_active=num_active,
            has_router_bias=layer >= num_hash_layers,
        )
        if layer < num_hash_layers:
            draft.add("layers.*.router.tid2eid", "router", draft.vocab_size, num_active, layer=layer)
        if num_shared:
            add_gated_mlp(draft, layer, num_shared * width, name="shared_experts")
        for name in PRE_NORMS:
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
        for name in ("attn_hc", "ffn_hc"):
            rows = streams * (streams + 2)
            draft.add(f"layers.*.{name}.fn", "other", rows, mixed, layer=layer)
            draft.add(f"layers.*.{name}.base", "other", 1, rows, layer=layer)
            draft.add(f"layers.*.{name}.scale", "other", 1, 3, layer=layer)
    draft.norm("norm", draft.hidden_size)
    draft.add("hc_head.fn", "other", streams, mixed)
    draft.add("hc_head.base", "other", 1, streams)
    draft.add("hc_head.scale", "other", 1, 1)
    draft.head(is_tied=fields.flag("tie_word_embeddings", default=False))
    return draft


def _ratios(draft: ShapeDraft) -> tuple[int, ...]:
    """Read the ratio of each layer; files list one more, of the draft model."""
    fields = draft.fields
    ratios = fields.raw("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < draft.num_layers:
        raise fields.error("compress_ratios", f"is not a list of {draft.num_layers} ratios, one a layer")
    for layer, ratio in enumerate(ratios):
        if ratio not in _KNOWN_RATIOS:
            raise UnsupportedModelError(
                f"{fields.where}: compress_ratios[{layer}] is {ratio!r}, a kind of layer that cannot be counted",
                because=f"the known ones are {', '.join(map(str, _KNOWN_RATIOS))}",
            )
    return tuple(ratios[: draft.num_layers])


def _add_attention(draft: ShapeDraft, layer: int, ratio: int) -> Layer:
    fields, hidden, heads, dim = draft.fields, draft.hidden_size, draft.num_heads, head_dim_of(draft)
    rank, groups, group_rank = (
        fields.whole("q_lora_rank"),
        fields.whole("o_groups", 8),
        fields.whole("o_lora_rank", 1024),
    )
    draft.linear("layers.*.q_a_proj", "attention", rank, hidden, layer=layer)
    draft.norm("layers.*.q_a_norm", rank, layer=layer)
    draft.linear("layers.*.q_b_proj", "attention", heads * dim, rank, layer=layer, num_shards=heads)
    draft.linear("layers.*.kv_proj", "attention", dim, hidden, layer=layer)
    draft.norm("layers.*.kv_norm", dim, layer=layer)
    o_columns = heads * dim // groups
    draft.linear("layers.*.o_a_proj", "attention", groups * group_rank, o_columns, layer=layer, num_shards=groups)
    draft.linear("layers.*.o_b_proj", "attention", hidden, groups * group_rank, layer=layer, num_shards=groups)
    draft.add("layers.*.sinks", "attention", 1, heads, layer=layer, num_shards=heads)
    rope = fields.whole("qk_rope_head_dim", 64)
    local = LayerKV(
        kind="sliding",
        num_kv_heads=1,
        key_dim=dim,
        value_dim=0,
        window=fields.whole("sliding_window"),
        rope_dim=rope,
    )
    if not ratio:
        return Layer(kv=local)
    is_indexed = ratio == _INDEXED_RATIO
    _add_compressor(draft, layer, dim, ratio, name="compressor", is_doubled=is_indexed)
    index_bytes = 0
    if is_indexed:
        index_heads, index_dim = fields.whole("index_n_heads"), fields.whole("index_head_dim")
        _add_compressor(draft, layer, index_dim, ratio, name="indexer", is_doubled=True)
        draft.linear("layers.*.indexer.q_b_proj", "attention", index_heads * index_dim, rank, layer=layer)
        draft.add("layers.*.indexer.weights_proj.weight", "attention", index_heads, hidden, layer=layer)
        index_bytes = index_key_bytes(index_dim)
    entries = LayerKV(
        kind="latent",
        num_kv_heads=1,
        key_dim=dim,
        value_dim=0,
        index_bytes=index_bytes,
        rope_dim=rope,
        tokens_per_entry=ratio,
    )
    return Layer(kv=entries, local=local)


def _add_compressor(draft: ShapeDraft, layer: int, dim: int, ratio: int, *, name: str, is_doubled: bool) -> None:
    rows = dim * (2 if is_doubled else 1)
    for part in ("kv_proj", "gate_proj"):
        draft.linear(f"layers.*.{name}.{part}", "attention", rows, draft.hidden_size, layer=layer)
    draft.add(f"layers.*.{name}.position_bias", "attention", ratio, rows, layer=layer)
    draft.norm(f"layers.*.{name}.kv_norm", dim, layer=layer)
