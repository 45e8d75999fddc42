"""Families of the Llama plan: rotary positions, RMS norms, a gated MLP in every layer; windows and biases differ."""

from __future__ import annotations

from octavo.models.fields import Fields
from octavo.models.shapes.decoder import PRE_NORMS, SANDWICH_NORMS, add_decoder, head_dim_of, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.layer_windows import (
    Windows,
    alternating_windows,
    full_windows,
    mistral_windows,
    qwen_windows,
    sliding_windows,
    smollm3_windows,
    uniform_windows,
    window_of,
)
from octavo.models.shapes.parts import Attention, add_gated_mlp

# Files of Gemma 3 that hold images too leave out what equals the defaults of its text configuration.
_GEMMA3_TEXT = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}


def draft_llama(fields: Fields) -> ShapeDraft:
    """Llama, and what is stored as Llama: Yi, CodeLlama, TinyLlama, SmolLM2, distilled models."""
    has_bias = fields.flag("attention_bias", default=False)
    draft = ShapeDraft(fields)
    return _gated(
        draft,
        windows=full_windows(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias", default=False),
    )


def draft_mistral(fields: Fields) -> ShapeDraft:
    """Mistral: a window in every layer of the first release, none since."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=mistral_windows(draft))


def draft_ministral(fields: Fields) -> ShapeDraft:
    """Ministral: windows in the layers that the file lists."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=sliding_windows(draft, window_of(fields, 4096)))


def draft_ministral3(fields: Fields) -> ShapeDraft:
    """Ministral 3: no windows, or one in every layer."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=uniform_windows(draft, window_of(fields)))


def draft_qwen2(fields: Fields) -> ShapeDraft:
    """Qwen 1.5, 2 and 2.5: biases on q, k and v."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=qwen_windows(draft), has_qkv_bias=True)


def draft_qwen3(fields: Fields) -> ShapeDraft:
    """Qwen 3: norms on the heads of q and k instead of biases."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    if "head_dim" not in fields:
        raise fields.error("head_dim", "is missing", because="Qwen3 heads are not hidden_size / num_attention_heads")
    return _gated(draft, windows=qwen_windows(draft), has_qkv_bias=has_bias, has_output_bias=has_bias, has_qk_norm=True)


def draft_phi3(fields: Fields) -> ShapeDraft:
    """Phi 3 and Phi 4: a window in files that have one."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=uniform_windows(draft, window_of(fields)))


def draft_gemma(fields: Fields) -> ShapeDraft:
    """Gemma 1: heads that are wider than their share of the hidden size; a tied head."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=full_windows(draft), is_tied_by_default=True)


def draft_gemma2(fields: Fields) -> ShapeDraft:
    """Gemma 2: every second layer slides; norms before and after both halves of a layer."""
    draft = ShapeDraft(fields)
    windows = alternating_windows(draft, period=2)
    return _gated(draft, windows=windows, layer_norms=SANDWICH_NORMS, is_tied_by_default=True)


def draft_gemma3(fields: Fields) -> ShapeDraft:
    """Gemma 3: five sliding layers, then a full one; norms on q and k."""
    draft = ShapeDraft(fields.with_defaults(_GEMMA3_TEXT), default_max_position=131_072)
    return _gated(
        draft,
        windows=alternating_windows(draft, period=6, pattern_field="sliding_window_pattern"),
        has_qk_norm=True,
        layer_norms=SANDWICH_NORMS,
        is_tied_by_default=True,
    )


def draft_granite(fields: Fields) -> ShapeDraft:
    """Granite 3: a Llama with multipliers, which take no bytes."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _gated(
        draft,
        windows=full_windows(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias", default=False),
    )


def draft_smollm3(fields: Fields) -> ShapeDraft:
    """SmolLM 3: layers without positions among those with; a tied head."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _gated(
        draft,
        windows=smollm3_windows(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias", default=False),
        is_tied_by_default=True,
    )


def draft_olmo(fields: Fields) -> ShapeDraft:
    """OLMo 1: norms without weights."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _gated(
        draft,
        windows=full_windows(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_norm_weight=False,
    )


def draft_olmo2(fields: Fields) -> ShapeDraft:
    """OLMo 2: norms after attention and MLP, and over all heads of q and of k at once."""
    return _olmo(ShapeDraft(fields), is_windowed=False)


def draft_olmo3(fields: Fields) -> ShapeDraft:
    """OLMo 3: as OLMo 2, with three sliding layers of four."""
    return _olmo(ShapeDraft(fields), is_windowed=True)


def _olmo(draft: ShapeDraft, *, is_windowed: bool) -> ShapeDraft:
    has_bias = draft.fields.flag("attention_bias", default=False)
    return _gated(
        draft,
        windows=alternating_windows(draft, period=4) if is_windowed else full_windows(draft),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        is_norm_over_heads=True,
        layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )


def draft_cohere(fields: Fields) -> ShapeDraft:
    """Command R: one norm a layer, attention and MLP side by side, norms on each head of q and k in the larger."""
    draft = ShapeDraft(fields)
    head_dim, has_bias = head_dim_of(draft), fields.flag("attention_bias", default=False)
    kv_heads = num_kv_heads_of(draft)
    widths = (draft.num_heads * head_dim, kv_heads * head_dim) if fields.flag("use_qk_norm", default=False) else ()
    return add_decoder(
        draft,
        attention=lambda _: Attention(
            num_heads=draft.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            qk_norm_widths=widths,
        ),
        mlp=lambda draft, layer: add_gated_mlp(draft, layer, fields.whole("intermediate_size")),
        layer_norms=("input_layernorm",),
        is_tied_by_default=True,
    )


def draft_cohere2(fields: Fields) -> ShapeDraft:
    """Command R7B and A: three sliding layers, then a full one."""
    draft = ShapeDraft(fields)
    has_bias = fields.flag("attention_bias", default=False)
    return _gated(
        draft,
        windows=alternating_windows(draft, period=4, pattern_field="sliding_window_pattern"),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        layer_norms=("input_layernorm",),
        is_tied_by_default=True,
    )


def draft_glm(fields: Fields) -> ShapeDraft:
    """GLM 4 (2024): biases on q, k and v unless the file says otherwise."""
    draft = ShapeDraft(fields)
    return _gated(draft, windows=full_windows(draft), has_qkv_bias=fields.flag("attention_bias", default=True))


def draft_glm4(fields: Fields) -> ShapeDraft:
    """GLM 4 (2025): as before, with norms after attention and MLP as well."""
    draft = ShapeDraft(fields)
    return _gated(
        draft,
        windows=full_windows(draft),
        has_qkv_bias=fields.flag("attention_bias", default=True),
        layer_norms=(*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    )


def draft_exaone4(fields: Fields) -> ShapeDraft:
    """EXAONE 4: norms after attention and MLP, norms on q and k; three sliding layers of four, or none."""
    draft = ShapeDraft(fields)
    is_windowed = window_of(fields, 4096) is not None
    return _gated(
        draft,
        windows=alternating_windows(draft, period=4, pattern_field="sliding_window_pattern")
        if is_windowed
        else full_windows(draft),
        has_qk_norm=True,
        layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )


def draft_seed_oss(fields: Fields) -> ShapeDraft:
    """Seed-OSS: biases on q, k and v."""
    draft = ShapeDraft(fields)
    return _gated(
        draft,
        windows=full_windows(draft),
        has_qkv_bias=fields.flag("attention_bias", default=True),
        has_output_bias=fields.flag("attention_out_bias", default=False),
        has_mlp_bias=fields.flag("mlp_bias", default=False),
    )


def _gated(
    draft: ShapeDraft,
    *,
    windows: Windows,
    has_qkv_bias: bool = False,
    has_output_bias: bool = False,
    has_mlp_bias: bool = False,
    has_qk_norm: bool = False,
    is_norm_over_heads: bool = False,
    layer_norms: tuple[str, ...] = PRE_NORMS,
    has_norm_weight: bool = True,
    is_tied_by_default: bool = False,
) -> ShapeDraft:
    fields, head_dim, num_kv_heads = draft.fields, head_dim_of(draft), num_kv_heads_of(draft)
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
        mlp=lambda draft, layer: add_gated_mlp(draft, layer, fields.whole("intermediate_size"), has_bias=has_mlp_bias),
        layer_norms=layer_norms,
        has_norm_weight=has_norm_weight,
        is_tied_by_default=is_tied_by_default,
    )
