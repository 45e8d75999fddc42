"""The decoder-only transformer as a list of ops; flags of the spec switch the variants of its families.

embed (and positions)
per layer:  norm, q|k|v, (q and k norms), rotate and store, attend, o, (norm), add,
            norm, gate|up, activate, down, (norm), add            or, for a mixture, route and experts in the middle
select the rows whose logits are wanted, norm, head, (cap)
"""

from __future__ import annotations

from octavo.models.kv_groups import layer_windows
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    Buffer,
    BufferName,
    Combine,
    Embed,
    EmbedPosition,
    ExpertLinear,
    HeadRmsNorm,
    LayerNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    Route,
    SelectRows,
    SoftCap,
    WeightName,
)
from octavo.models.sparse import is_sparse_layer
from octavo.models.spec import Mixture, ModelSpec


def emit_decoder(spec: ModelSpec) -> Program:
    """Return the model's program. All layers share the same few buffers.

    `branch` holds what flows beside the residual: a norm's output, then the attention's or the MLP's contribution.
    """
    windows = layer_windows(spec.kv_groups)
    num_sinks = _num_sinks(spec)
    assert len(windows) == spec.num_layers, "every layer is in a KV group"
    ops: list[Op] = [Embed(out="residual", weight="embed", scale=spec.embed_scale)]
    if spec.has_learned_positions:
        ops += [EmbedPosition(out="branch", weight="positions"), Add(x="residual", y="branch")]
    for layer in range(spec.num_layers):
        ops += _attention(spec, layer, windows[layer], num_sinks)
        ops += _mlp(spec, layer)
    ops += [
        SelectRows(x="residual", out="selected"),
        _norm(spec, "selected", "selected", "final_norm"),
        Linear(x="selected", out="logits", weights=("embed" if spec.tie_embeddings else "lm_head",)),
    ]
    if spec.logits_softcap:
        ops.append(SoftCap(x="logits", cap=spec.logits_softcap))
    return Program(ops=tuple(ops), buffers=_buffers(spec), logits="logits")


def _buffers(spec: ModelSpec) -> dict[BufferName, Buffer]:
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "residual": Buffer(width=spec.hidden_size, rows="token"),
        "branch": Buffer(width=spec.hidden_size, rows="token"),
        "qkv": Buffer(width=q_width + 2 * kv_width, rows="token"),
        "attended": Buffer(width=q_width, rows="token"),
        **({"sink_q": Buffer(width=q_width, rows="token")} if _num_sinks(spec) else {}),
        **(_mlp_buffers(spec) if spec.mixture is None else _mixture_buffers(spec, spec.mixture)),
        "selected": Buffer(width=spec.hidden_size, rows="selected"),
        "logits": Buffer(width=spec.vocab_size, rows="selected"),
    }


def _mlp_buffers(spec: ModelSpec) -> dict[BufferName, Buffer]:
    return {
        "gate_up": Buffer(width=(2 if spec.has_gate else 1) * spec.intermediate_size, rows="token"),
        "activated": Buffer(width=spec.intermediate_size, rows="token"),
    }


def _mixture_buffers(spec: ModelSpec, mixture: Mixture) -> dict[BufferName, Buffer]:
    hidden, inner, num_active = spec.hidden_size, mixture.expert_size, mixture.num_active
    widths = {
        "scores": mixture.num_experts,
        "routes": 2 * num_active,
        "gate_up": num_active * 2 * inner,
        "activated": num_active * inner,
        "experts_out": num_active * hidden,
        "gathered_in": hidden,
        "product_in": 2 * inner,
        "gathered_out": inner,
        "product_out": hidden,
    }
    return {name: Buffer(width=width, rows="token") for name, width in widths.items()}


def _num_sinks(spec: ModelSpec) -> int:
    """Return the sinks of every layer: they come with a window over the whole model."""
    counts = {group.num_sinks for group in spec.kv_groups}
    assert len(counts) <= 1, "sinks are the same in all layers"
    return max(counts, default=0)


def _attention(spec: ModelSpec, layer: int, window: int | None, num_sinks: int) -> list[Op]:
    names = f"layers.{layer}."
    sink_q = "sink_q" if num_sinks else None
    projections = ("qkv",) if spec.has_fused_qkv else ("q", "k", "v")
    ops: list[Op] = []
    x = "residual"
    if spec.norm_places != "after":
        ops.append(_norm(spec, "residual", "branch", names + "attn_norm"))
        x = "branch"
    ops.append(_linear(x, "qkv", names, projections, has_bias=spec.qkv_bias))
    if spec.qk_norm:
        ops += _qk_norms(spec, names)
    ops += [
        RopeStore(
            qkv="qkv",
            layer=layer,
            is_local=window is not None and spec.local_rope is not None,
            sink_q=sink_q,
            sink_position=num_sinks + window - 1 if num_sinks and window else 0,
        ),
        Attend(
            qkv="qkv",
            out="attended",
            layer=layer,
            scale=spec.attention_scale or spec.head_dim**-0.5,
            window=window,
            softcap=spec.attention_softcap,
            sparse_blocks=spec.sparse_blocks if is_sparse_layer(spec, layer) else 0,
            num_sinks=num_sinks,
            sink_q=sink_q,
        ),
        _linear("attended", "branch", names, ("o",), has_bias=spec.output_bias),
    ]
    if spec.norm_places != "before":
        ops.append(_norm(spec, "branch", "branch", names + "attn_post_norm"))
    return [*ops, Add(x="residual", y="branch")]


def _qk_norms(spec: ModelSpec, names: WeightName) -> list[Op]:
    ops: list[Op] = []
    offset = 0
    for name, num_heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
        width = num_heads * spec.head_dim
        num_norms = 1 if spec.qk_norm_spans_heads else num_heads
        ops.append(
            HeadRmsNorm(
                x="qkv",
                offset=offset,
                num_heads=num_norms,
                head_dim=width // num_norms,
                weight=names + name,
                eps=spec.norm_eps,
            )
        )
        offset += width
    return ops


def _mlp(spec: ModelSpec, layer: int) -> list[Op]:
    names = f"layers.{layer}."
    ops: list[Op] = []
    x = "residual"
    if spec.norm_places != "after":
        ops.append(_norm(spec, "residual", "branch", names + "mlp_norm"))
        x = "branch"
    if spec.mixture is None:
        ups = ("gate_up",) if spec.has_fused_gate_up else ("gate", "up") if spec.has_gate else ("up",)
        ops += [
            _linear(x, "gate_up", names, ups, has_bias=spec.mlp_bias),
            Activate(x="gate_up", out="activated", kind=spec.activation, has_gate=spec.has_gate),
            _linear("activated", "branch", names, ("down",), has_bias=spec.mlp_bias),
        ]
    else:
        ops += _experts(spec, spec.mixture, x, names)
    if spec.norm_places != "before":
        ops.append(_norm(spec, "branch", "branch", names + "mlp_post_norm"))
    return [*ops, Add(x="residual", y="branch")]


def _experts(spec: ModelSpec, mixture: Mixture, x: BufferName, names: WeightName) -> list[Op]:
    def weights(*each: str) -> tuple[tuple[WeightName, ...], ...]:
        return tuple(tuple(f"{names}experts.{expert}.{name}" for name in each) for expert in range(mixture.num_experts))

    num_active = mixture.num_active
    return [
        Linear(x=x, out="scores", weights=(names + "router",)),
        Route(x="scores", out="routes", num_active=num_active, is_normalised=mixture.is_normalised),
        ExpertLinear(
            x=x,
            routes="routes",
            out="gate_up",
            weights=weights("gate", "up"),
            num_active=num_active,
            is_split=False,
            gathered="gathered_in",
            product="product_in",
        ),
        Activate(x="gate_up", out="activated", kind=spec.activation, num_parts=num_active),
        ExpertLinear(
            x="activated",
            routes="routes",
            out="experts_out",
            weights=weights("down"),
            num_active=num_active,
            is_split=True,
            gathered="gathered_out",
            product="product_out",
        ),
        Combine(x="experts_out", routes="routes", out="branch", num_active=num_active),
    ]


def _norm(spec: ModelSpec, x: BufferName, out: BufferName, weight: WeightName) -> Op:
    if spec.has_layer_norm:
        return LayerNorm(x=x, out=out, weight=weight, bias=f"{weight}_bias", eps=spec.norm_eps)
    return RmsNorm(x=x, out=out, weight=weight, eps=spec.norm_eps)


def _linear(x: BufferName, out: BufferName, prefix: WeightName, names: tuple[str, ...], *, has_bias: bool) -> Linear:
    """Several weights side by side: q, k and v (or gate and up) are one product."""
    weights = tuple(prefix + name for name in names)
    return Linear(x=x, out=out, weights=weights, biases=tuple(f"{w}_bias" for w in weights) if has_bias else ())
