"""The plan that most families share: per layer norms, attention and an MLP, between an embedding and a head."""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.fields import Fields
from octavo.models.shapes.draft import ShapeDraft, first_whole
from octavo.models.shapes.parts import Attention, add_attention

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

AttentionOf = Callable[[int], Attention]
AddMlp = Callable[[ShapeDraft, int], None]


def add_decoder(
    draft: ShapeDraft,
    *,
    attention: AttentionOf,
    mlp: AddMlp,
    layer_norms: tuple[str, ...] = PRE_NORMS,
    has_norm_weight: bool = True,
    has_norm_bias: bool = False,
    is_tied_by_default: bool = False,
    has_head_bias: bool = False,
) -> ShapeDraft:
    """Count a whole model of that plan.

    Args:
        attention: The attention of a layer, by its number.
        mlp: Counts the MLP or the experts of a layer.
        is_tied_by_default: What a file means that does not say whether the head is the embedding table.
    """
    draft.embedding()
    for layer in range(draft.num_layers):
        draft.layers.append(add_attention(draft, layer, attention(layer)))
        mlp(draft, layer)
        for name in layer_norms if has_norm_weight else ():
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer, has_bias=has_norm_bias)
    if has_norm_weight:
        draft.norm("norm", draft.hidden_size, has_bias=has_norm_bias)
    draft.head(is_tied=draft.fields.flag("tie_word_embeddings", default=is_tied_by_default), has_bias=has_head_bias)
    return draft


def head_dim_of(draft: ShapeDraft) -> int:
    """Return the width of a head: its own field, else the hidden size shared by the heads."""
    fields = draft.fields
    if "head_dim" in fields:
        return fields.whole("head_dim")
    if draft.hidden_size % draft.num_heads:
        raise fields.error("hidden_size", f"{draft.hidden_size} does not divide into {draft.num_heads} heads")
    return draft.hidden_size // draft.num_heads


def num_kv_heads_of(draft: ShapeDraft) -> int:
    """Return the heads that are cached: all, where the file does not say that they are shared."""
    num_kv_heads = first_whole(draft.fields, ("num_key_value_heads", "num_kv_heads", "n_head_kv"), draft.num_heads)
    if draft.num_heads % num_kv_heads:
        raise draft.fields.error(
            "num_key_value_heads",
            f"is {num_kv_heads}: {draft.num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly",
        )
    return num_kv_heads


def inner_width(fields: Fields, hidden_size: int) -> int:
    """Return the width of an MLP in files that may leave it out, as four times the hidden size."""
    return first_whole(fields, ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 4 * hidden_size)
