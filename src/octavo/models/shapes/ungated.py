"""Families of the Llama plan whose MLP has no gate."""

from __future__ import annotations

from octavo.models.fields import Fields
from octavo.models.shapes.decoder import add_decoder, head_dim_of, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.layer_windows import full_windows, uniform_windows, window_of
from octavo.models.shapes.parts import Attention, add_plain_mlp


def draft_starcoder2(fields: Fields) -> ShapeDraft:
    """StarCoder 2: LayerNorms, biases, an MLP without gate, a window in every layer."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("use_bias", default=True)
    windows = uniform_windows(draft, window_of(fields))
    return add_decoder(
        draft,
        attention=lambda layer: Attention(
            num_heads=draft.num_heads,
            num_kv_heads=num_kv_heads_of(draft),
            head_dim=head_dim_of(draft),
            window=windows[layer],
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        mlp=lambda draft, layer: add_plain_mlp(draft, layer, fields.whole("intermediate_size"), has_bias=has_bias),
        has_norm_bias=True,
        is_tied_by_default=True,
    )


def draft_nemotron(fields: Fields) -> ShapeDraft:
    """Nemotron 3 and 4, Minitron: LayerNorms."""
    return _ungated(ShapeDraft(fields), has_norm_bias=True)


def draft_arcee(fields: Fields) -> ShapeDraft:
    """AFM: RMS norms."""
    return _ungated(ShapeDraft(fields), has_norm_bias=False)


def _ungated(draft: ShapeDraft, *, has_norm_bias: bool) -> ShapeDraft:
    fields = draft.fields
    full_windows(draft)
    has_bias, has_mlp_bias = fields.flag("attention_bias", default=False), fields.flag("mlp_bias", default=False)
    attention = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads_of(draft),
        head_dim=head_dim_of(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    return add_decoder(
        draft,
        attention=lambda _: attention,
        mlp=lambda draft, layer: add_plain_mlp(draft, layer, fields.whole("intermediate_size"), has_bias=has_mlp_bias),
        has_norm_bias=has_norm_bias,
    )
