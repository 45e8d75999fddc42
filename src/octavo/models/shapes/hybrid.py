"""Hybrids: attention in some layers, a recurrent state per request in the others."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shape import Layer
from octavo.models.shapes.decoder import PRE_NORMS, head_dim_of, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft, first_whole
from octavo.models.shapes.latent import add_latent_attention
from octavo.models.shapes.layer_windows import layer_types_of
from octavo.models.shapes.mixture import dense_then_experts, num_active_of, num_experts_of, qwen_experts
from octavo.models.shapes.parts import Attention, add_attention, add_experts, add_gated_mlp, add_plain_mlp
from octavo.models.shapes.recurrent import (
    DeltaNet,
    KimiDelta,
    Mamba1,
    Mamba2,
    add_delta_net,
    add_kimi_delta,
    add_mamba1,
    add_mamba2,
)


def draft_qwen3_next(fields: Fields) -> ShapeDraft:
    """Qwen3-Next and Qwen 3.5: three delta rule layers, then gated attention; dense or a mixture."""
    draft = ShapeDraft(fields)
    every = fields.whole("full_attention_interval", 4)
    types = layer_types_of(fields, draft.num_layers, known=("full_attention", "linear_attention"))
    if types is None:
        types = tuple("linear_attention" if (n + 1) % every else "full_attention" for n in range(draft.num_layers))
    net = DeltaNet(
        num_key_heads=fields.whole("linear_num_key_heads"),
        num_value_heads=fields.whole("linear_num_value_heads"),
        key_dim=fields.whole("linear_key_head_dim"),
        value_dim=fields.whole("linear_value_head_dim"),
        kernel=fields.whole("linear_conv_kernel_dim"),
        is_wide=fields.text("mamba_ssm_dtype", "") == "float32",
    )
    has_bias, head_dim = fields.flag("attention_bias", default=False), head_dim_of(draft)
    attention = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads_of(draft),
        head_dim=head_dim,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm_widths=(head_dim, head_dim),
        has_gate=True,
    )
    mlp = qwen_experts(fields) if "num_experts" in fields else None
    draft.embedding()
    for layer, kind in enumerate(types):
        is_full = kind == "full_attention"
        draft.layers.append(add_attention(draft, layer, attention) if is_full else add_delta_net(draft, layer, net))
        if mlp is None:
            add_gated_mlp(draft, layer, fields.whole("intermediate_size"))
        else:
            mlp(draft, layer)
    return _finish(draft, PRE_NORMS, is_tied_by_default=False)


def draft_kimi_linear(fields: Fields) -> ShapeDraft:
    """Kimi Linear: delta attention with a rate per channel, and latent attention in the layers that the file lists."""
    draft = ShapeDraft(
        fields, default_max_position=fields.whole("model_max_length") if "model_max_length" in fields else None
    )
    linear = fields.inner("linear_attn_config")
    full_layers = linear.raw("full_attn_layers")
    if not isinstance(full_layers, list) or not all(type(layer) is int for layer in full_layers):
        raise linear.error("full_attn_layers", "is not a list of layers, counted from 1")
    delta = KimiDelta(
        num_heads=linear.whole("num_heads"),
        head_dim=linear.whole("head_dim"),
        kernel=linear.whole("short_conv_kernel_size"),
    )
    # Files older than these fields are of the one released model: a dense first layer, one shared expert.
    mlp = dense_then_experts(fields.with_defaults({"first_k_dense_replace": 1, "num_shared_experts": 1}))
    draft.embedding()
    for layer in range(draft.num_layers):
        is_full = layer + 1 in full_layers
        kept = add_latent_attention(draft, layer) if is_full else add_kimi_delta(draft, layer, delta)
        draft.layers.append(kept)
        mlp(draft, layer)
    return _finish(draft, PRE_NORMS, is_tied_by_default=False)


def draft_nemotron_h(fields: Fields) -> ShapeDraft:
    """Nemotron-H: each layer is one thing, a Mamba 2 block, an attention, an MLP or a mixture; a letter names it."""
    draft = ShapeDraft(fields)
    pattern = fields.text("hybrid_override_pattern")
    if len(pattern) != draft.num_layers:
        raise fields.error("hybrid_override_pattern", f"does not name {draft.num_layers} layers")
    mamba = Mamba2(
        num_heads=fields.whole("mamba_num_heads"),
        head_dim=fields.whole("mamba_head_dim"),
        state_dim=fields.whole("ssm_state_size"),
        num_groups=fields.whole("n_groups"),
        kernel=fields.whole("conv_kernel"),
        is_wide=fields.text("mamba_ssm_cache_dtype", "") == "float32",
        has_conv_bias=fields.flag("use_conv_bias", default=True),
        has_bias=fields.flag("mamba_proj_bias", default=False),
    )
    has_bias = fields.flag("attention_bias", default=False)
    attention = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads_of(draft),
        head_dim=first_whole(fields, ("head_dim", "attention_head_dim"), draft.hidden_size // draft.num_heads),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    draft.embedding()
    for layer, letter in enumerate(pattern):
        if letter == "M":
            draft.layers.append(add_mamba2(draft, layer, mamba))
        elif letter == "*":
            draft.layers.append(add_attention(draft, layer, attention))
        elif letter == "-":
            add_plain_mlp(
                draft, layer, fields.whole("intermediate_size"), has_bias=fields.flag("mlp_bias", default=False)
            )
            draft.layers.append(Layer())
        elif letter == "E":
            _add_nemotron_experts(draft, layer)
            draft.layers.append(Layer())
        else:
            raise UnsupportedModelError(
                f"{fields.where}: hybrid_override_pattern[{layer}] is {letter!r}, a layer that cannot be counted",
                because="the known ones are M (Mamba 2), * (attention), - (MLP) and E (experts)",
            )
    return _finish(draft, ("norm",), is_tied_by_default=False)


def _add_nemotron_experts(draft: ShapeDraft, layer: int) -> None:
    fields = draft.fields
    width = fields.whole("moe_intermediate_size")
    add_experts(
        draft,
        layer,
        width,
        num_experts=num_experts_of(fields),
        num_active=num_active_of(fields),
        has_router_bias=True,
        has_gate=False,
    )
    num_shared = fields.whole("n_shared_experts", 0, minimum=0)
    if num_shared:
        # Without the field: the shared expert of the released mixtures is twice as wide as a routed one.
        shared_width = fields.whole("moe_shared_expert_intermediate_size", 2 * width)
        add_plain_mlp(draft, layer, num_shared * shared_width, name="shared_experts", has_bias=False)


def draft_granite_hybrid(fields: Fields) -> ShapeDraft:
    """Granite 4: Mamba 2 layers and a few of attention; a shared MLP in each, experts beside it in the larger."""
    draft = ShapeDraft(fields)
    types = layer_types_of(fields, draft.num_layers, known=("attention", "mamba", "full_attention", "linear_attention"))
    if types is None:
        raise fields.error("layer_types", "is missing")
    mamba = _granite_mamba(draft)
    has_bias = fields.flag("attention_bias", default=False)
    attention = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads_of(draft),
        head_dim=head_dim_of(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    num_experts = fields.whole("num_local_experts", 0, minimum=0)
    draft.embedding()
    for layer, kind in enumerate(types):
        is_full = kind in ("attention", "full_attention")
        draft.layers.append(add_attention(draft, layer, attention) if is_full else add_mamba2(draft, layer, mamba))
        if num_experts:
            width = fields.whole("intermediate_size")
            add_experts(draft, layer, width, num_experts=num_experts, num_active=num_active_of(fields))
        add_gated_mlp(draft, layer, fields.whole("shared_intermediate_size"), name="shared_mlp")
    return _finish(draft, PRE_NORMS, is_tied_by_default=False)


def _granite_mamba(draft: ShapeDraft) -> Mamba2:
    fields = draft.fields
    num_heads = fields.whole("mamba_n_heads")
    width = fields.whole("mamba_expand", 2) * draft.hidden_size
    head_dim = fields.raw("mamba_d_head")
    return Mamba2(
        num_heads=num_heads,
        head_dim=width // num_heads if head_dim in (None, "auto") else fields.whole("mamba_d_head"),
        state_dim=fields.whole("mamba_d_state"),
        num_groups=fields.whole("mamba_n_groups", 1),
        kernel=fields.whole("mamba_d_conv"),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_bias=fields.flag("mamba_proj_bias", default=False),
    )


def draft_jamba(fields: Fields) -> ShapeDraft:
    """Jamba: Mamba 1 layers, attention every eighth, experts in every second."""
    draft = ShapeDraft(fields)
    mamba = Mamba1(
        width=fields.whole("mamba_expand", 2) * draft.hidden_size,
        state_dim=fields.whole("mamba_d_state"),
        dt_rank=fields.whole("mamba_dt_rank"),
        kernel=fields.whole("mamba_d_conv"),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_bias=fields.flag("mamba_proj_bias", default=False),
    )
    attention = Attention(num_heads=draft.num_heads, num_kv_heads=num_kv_heads_of(draft), head_dim=head_dim_of(draft))
    width, num_experts = fields.whole("intermediate_size"), num_experts_of(fields)
    draft.embedding()
    for layer in range(draft.num_layers):
        is_full = _is_turn(fields, layer, "attn_layer")
        draft.layers.append(add_attention(draft, layer, attention) if is_full else add_mamba1(draft, layer, mamba))
        if num_experts > 1 and _is_turn(fields, layer, "expert_layer"):
            add_experts(draft, layer, width, num_experts=num_experts, num_active=num_active_of(fields))
        else:
            add_gated_mlp(draft, layer, width)
    return _finish(draft, ("input_layernorm", "pre_ff_layernorm"), is_tied_by_default=False)


def _is_turn(fields: Fields, layer: int, name: str) -> bool:
    period, offset = fields.whole(f"{name}_period"), fields.whole(f"{name}_offset", minimum=0)
    return layer % period == offset


def _finish(draft: ShapeDraft, layer_norms: tuple[str, ...], *, is_tied_by_default: bool) -> ShapeDraft:
    for layer in range(draft.num_layers):
        for name in layer_norms:
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
    draft.norm("norm", draft.hidden_size)
    draft.head(is_tied=draft.fields.flag("tie_word_embeddings", default=is_tied_by_default))
    return draft
