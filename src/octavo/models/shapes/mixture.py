"""Mixtures of experts with ordinary attention: every token passes a router and a few of many small MLPs."""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shapes.decoder import PRE_NORMS, AddMlp, add_decoder, head_dim_of, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft, first_whole
from octavo.models.shapes.layer_windows import (
    Windows,
    alternating_windows,
    dots_windows,
    full_windows,
    layer_types_of,
    qwen2_moe_windows,
    qwen3_moe_windows,
    uniform_windows,
    window_of,
)
from octavo.models.shapes.parts import Attention, add_experts, add_gated_mlp

EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
ACTIVE_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def draft_mixtral(fields: Fields) -> ShapeDraft:
    """Mixtral: experts as wide as a dense MLP."""
    draft = ShapeDraft(fields)
    return _mixture(
        draft, windows=uniform_windows(draft, window_of(fields)), mlp=all_experts(fields, "intermediate_size")
    )


def draft_qwen2_moe(fields: Fields) -> ShapeDraft:
    """Qwen 1.5 and 2 MoE: a shared expert with a gate of its own, biases on q, k and v."""
    draft = ShapeDraft(fields)
    return _mixture(
        draft,
        windows=qwen2_moe_windows(draft),
        mlp=qwen_experts(fields),
        has_qkv_bias=fields.flag("qkv_bias", default=True),
    )


def draft_qwen3_moe(fields: Fields) -> ShapeDraft:
    """Qwen 3 MoE: norms on q and k, no shared expert."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _mixture(
        draft,
        windows=qwen3_moe_windows(draft),
        mlp=qwen_experts(fields),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
    )


def draft_olmoe(fields: Fields) -> ShapeDraft:
    """OLMoE: norms over all heads of q and of k at once."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _mixture(
        draft,
        windows=full_windows(draft),
        mlp=all_experts(fields, "intermediate_size"),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        is_norm_over_heads=True,
    )


def draft_granite_moe(fields: Fields) -> ShapeDraft:
    """Granite 3 MoE."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _mixture(
        draft,
        windows=full_windows(draft),
        mlp=all_experts(fields, "intermediate_size"),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


def draft_minimax_m2(fields: Fields) -> ShapeDraft:
    """MiniMax M2: norms over all heads, a correction bias on the router."""
    draft = ShapeDraft(fields)
    return _mixture(
        draft,
        windows=full_windows(draft),
        mlp=all_experts(fields, "intermediate_size", has_correction=True),
        has_qk_norm=True,
        is_norm_over_heads=True,
    )


def draft_glm4_moe(fields: Fields) -> ShapeDraft:
    """GLM 4.5 to 4.7: the first layers dense, a shared expert in the others, biases on q, k and v where said."""
    draft = ShapeDraft(fields)
    return _mixture(
        draft,
        windows=full_windows(draft),
        mlp=dense_then_experts(fields),
        has_qkv_bias=fields.flag("attention_bias", default=False),
        has_qk_norm=fields.flag("use_qk_norm", default=False),
    )


def draft_dots1(fields: Fields) -> ShapeDraft:
    """dots.llm1: as GLM 4.5, with norms on q and k; windows where layers are left over for them."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _mixture(
        draft,
        windows=dots_windows(draft),
        mlp=dense_then_experts(fields),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
    )


def draft_gpt_oss(fields: Fields) -> ShapeDraft:
    """gpt-oss: biases everywhere, a sink logit per head, every second layer slides over 128 tokens."""
    draft = ShapeDraft(fields)
    windows = alternating_windows(draft, period=2, default=128)
    width, num_experts, num_active = fields.whole("intermediate_size"), num_experts_of(fields), num_active_of(fields)

    def add_mlp(draft: ShapeDraft, layer: int) -> None:
        draft.add("layers.*.sinks", "attention", 1, draft.num_heads, layer=layer, num_shards=draft.num_heads)
        add_experts(
            draft,
            layer,
            width,
            num_experts=num_experts,
            num_active=num_active,
            has_bias=True,
            has_router_bias=True,
        )

    has_bias = fields.flag("attention_bias", default=True)
    return _mixture(draft, windows=windows, mlp=add_mlp, has_qkv_bias=has_bias, has_output_bias=has_bias)


def draft_llama4(fields: Fields) -> ShapeDraft:
    """Llama 4: three chunked layers of four, the fourth full; a shared expert; dense layers between in Maverick."""
    draft = ShapeDraft(fields)
    chunks = _llama4_chunks(draft)
    head_dim, num_kv_heads = head_dim_of(draft), num_kv_heads_of(draft)
    has_bias = fields.flag("attention_bias", default=False)
    return add_decoder(
        draft,
        attention=lambda layer: Attention(
            num_heads=draft.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            chunk=chunks[layer],
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        mlp=_llama4_mlp(fields),
    )


def _llama4_chunks(draft: ShapeDraft) -> Windows:
    """Layers with positions look into their chunk, those without see all."""
    fields = draft.fields
    chunk = fields.whole("attention_chunk_size") if "attention_chunk_size" in fields else None
    if chunk is None and "attention_chunk_size" not in fields.names:
        chunk = 8192
    types = layer_types_of(fields, draft.num_layers, known=("full_attention", "chunked_attention"))
    if types is not None:
        return tuple(chunk if kind == "chunked_attention" else None for kind in types)
    listed = fields.raw("no_rope_layers")
    if isinstance(listed, list) and listed:
        if len(listed) != draft.num_layers or any(flag not in (0, 1) for flag in listed):
            raise fields.error("no_rope_layers", f"is not a list of {draft.num_layers} zeros and ones")
        return tuple(chunk if flag else None for flag in listed)
    every = fields.whole("no_rope_layer_interval", 4)
    return tuple(chunk if (layer + 1) % every else None for layer in range(draft.num_layers))


def _llama4_mlp(fields: Fields) -> AddMlp:
    width, num_experts, num_active = fields.whole("intermediate_size"), num_experts_of(fields), num_active_of(fields)
    step = fields.whole("interleave_moe_layer_step", 1)
    listed = fields.raw("moe_layers")

    def add_mlp(draft: ShapeDraft, layer: int) -> None:
        is_mixture = layer in listed if isinstance(listed, list) else (layer + 1) % step == 0
        if is_mixture:
            add_experts(draft, layer, width, num_experts=num_experts, num_active=num_active)
            add_gated_mlp(draft, layer, width, name="shared_expert")
        else:
            add_gated_mlp(draft, layer, fields.whole("intermediate_size_mlp"))

    return add_mlp


def draft_mimo_v2(fields: Fields) -> ShapeDraft:
    """MiMo V2: sliding layers with more KV heads and sinks among full ones; values narrower than keys."""
    draft = ShapeDraft(fields)
    pattern = fields.raw("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) != draft.num_layers or any(kind not in (0, 1) for kind in pattern):
        raise fields.error("hybrid_layer_pattern", f"is not a list of {draft.num_layers} zeros and ones")
    has_bias, window = fields.flag("attention_bias", default=False), fields.whole("sliding_window")
    full = Attention(
        num_heads=draft.num_heads,
        num_kv_heads=num_kv_heads_of(draft),
        head_dim=head_dim_of(draft),
        value_dim=fields.whole("v_head_dim"),
        has_qkv_bias=has_bias,
    )
    sliding = Attention(
        num_heads=fields.whole("swa_num_attention_heads", draft.num_heads),
        num_kv_heads=fields.whole("swa_num_key_value_heads"),
        head_dim=fields.whole("swa_head_dim"),
        value_dim=fields.whole("swa_v_head_dim"),
        window=window,
        has_qkv_bias=has_bias,
    )
    add_mlp = dense_then_experts(fields)

    def add_mlp_and_sinks(draft: ShapeDraft, layer: int) -> None:
        if pattern[layer]:
            draft.add("layers.*.sinks", "attention", 1, sliding.num_heads, layer=layer, num_shards=sliding.num_heads)
        add_mlp(draft, layer)

    return add_decoder(draft, attention=lambda layer: sliding if pattern[layer] else full, mlp=add_mlp_and_sinks)


def num_experts_of(fields: Fields) -> int:
    """Return the routed experts of a layer."""
    return first_whole(fields, EXPERT_COUNTS)


def num_active_of(fields: Fields) -> int:
    """Return the routed experts that a token uses."""
    num_active, num_experts = first_whole(fields, ACTIVE_COUNTS), num_experts_of(fields)
    if num_active > num_experts:
        raise fields.error(ACTIVE_COUNTS[0], f"is {num_active}, of {num_experts} experts")
    return num_active


def all_experts(fields: Fields, width_name: str, *, has_correction: bool = False) -> AddMlp:
    """Make experts in every layer, of the width that a field gives."""
    width, num_experts, num_active = fields.whole(width_name), num_experts_of(fields), num_active_of(fields)
    return lambda draft, layer: add_experts(
        draft, layer, width, num_experts=num_experts, num_active=num_active, has_router_bias=has_correction
    )


def qwen_experts(fields: Fields) -> AddMlp:
    """Make experts in every `decoder_sparse_step`-th layer, dense MLPs in the others and in those the file names."""
    width, num_experts, num_active = (
        fields.whole("moe_intermediate_size"),
        num_experts_of(fields),
        num_active_of(fields),
    )
    step = fields.whole("decoder_sparse_step", 1)
    dense_layers = fields.raw("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise fields.error("mlp_only_layers", "is not a list of layers")
    shared_width = fields.whole("shared_expert_intermediate_size", 0, minimum=0)

    def add_mlp(draft: ShapeDraft, layer: int) -> None:
        if layer in dense_layers or (layer + 1) % step:
            add_gated_mlp(draft, layer, fields.whole("intermediate_size"))
            return
        add_experts(draft, layer, width, num_experts=num_experts, num_active=num_active)
        if shared_width:
            add_gated_mlp(draft, layer, shared_width, name="shared_expert")
            draft.add("layers.*.shared_expert_gate.weight", "mlp", 1, draft.hidden_size, layer=layer)

    return add_mlp


def dense_then_experts(fields: Fields, *, has_correction: bool = True) -> AddMlp:
    """Make dense MLPs in the first layers, then experts with shared ones beside them, as DeepSeek does.

    Which layers are dense: `moe_layer_freq` as a list of zeros and ones, or `first_k_dense_replace`.
    """
    width = fields.whole("moe_intermediate_size")
    num_experts, num_active = num_experts_of(fields), num_active_of(fields)
    num_shared = first_whole(fields, ("n_shared_experts", "num_shared_experts"), 0) if _has_shared(fields) else 0
    frequency = fields.raw("moe_layer_freq")
    num_layers = fields.whole("num_hidden_layers")
    if isinstance(frequency, list):
        if len(frequency) != num_layers or any(kind not in (0, 1) for kind in frequency):
            raise fields.error("moe_layer_freq", f"is not a list of {num_layers} zeros and ones")
        is_mixture = tuple(bool(kind) for kind in frequency)
    else:
        if frequency not in (None, 1):
            raise UnsupportedModelError(f"{fields.describe('moe_layer_freq')}, a plan that cannot be counted")
        num_dense = fields.whole("first_k_dense_replace", 0, minimum=0)
        is_mixture = tuple(layer >= num_dense for layer in range(num_layers))

    def add_mlp(draft: ShapeDraft, layer: int) -> None:
        if not is_mixture[layer]:
            add_gated_mlp(draft, layer, fields.whole("intermediate_size"))
            return
        add_experts(draft, layer, width, num_experts=num_experts, num_active=num_active, has_router_bias=has_correction)
        if num_shared:
            add_gated_mlp(draft, layer, num_shared * width, name="shared_experts")

    return add_mlp


def _has_shared(fields: Fields) -> bool:
    return any(fields.raw(name) for name in ("n_shared_experts", "num_shared_experts"))


def _mixture(
    draft: ShapeDraft,
    *,
    windows: Windows,
    mlp: AddMlp,
    has_qkv_bias: bool = False,
    has_output_bias: bool = False,
    has_qk_norm: bool = False,
    is_norm_over_heads: bool = False,
) -> ShapeDraft:
    head_dim, num_kv_heads = head_dim_of(draft), num_kv_heads_of(draft)
    widths: tuple[int, ...] = ()
    if has_qk_norm:
        widths = (draft.num_heads * head_dim, num_kv_heads * head_dim) if is_norm_over_heads else (head_dim, head_dim)
    return add_decoder(
        draft,
        attention=lambda layer: Attention(
            num_heads=draft.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=windows[layer],
            has_qkv_bias=has_qkv_bias,
            has_output_bias=has_output_bias,
            qk_norm_widths=widths,
        ),
        mlp=mlp,
        layer_norms=PRE_NORMS,
    )
