"""The decoder-only transformer of the Llama family as a list of ops; flags of the spec switch its variants.

embed
per layer:  norm, q|k|v, (q and k norms), rotate and store, attend, o, add, norm, gate|up, activate, down, add
select the rows whose logits are wanted, norm, head
"""

from __future__ import annotations

from octavo.models.kv_groups import layer_windows
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    Buffer,
    BufferName,
    Embed,
    HeadRmsNorm,
    Linear,
    Op,
    Program,
    RmsNorm,
    RopeStore,
    SelectRows,
    WeightName,
)
from octavo.models.spec import ModelSpec


def emit_decoder(spec: ModelSpec) -> Program:
    """Return the model's program. All layers share the same few buffers.

    `branch` holds what flows beside the residual: a norm's output, then the attention's or the MLP's contribution.
    """
    windows = layer_windows(spec.kv_groups)
    assert len(windows) == spec.num_layers, "every layer is in a KV group"
    ops: list[Op] = [Embed(out="residual", weight="embed")]
    for layer in range(spec.num_layers):
        ops += _attention(spec, layer, windows[layer])
        ops += _mlp(spec, layer)
    ops += [
        SelectRows(x="residual", out="selected"),
        RmsNorm(x="selected", out="selected", weight="final_norm", eps=spec.norm_eps),
        Linear(x="selected", out="logits", weights=("embed" if spec.tie_embeddings else "lm_head",)),
    ]
    return Program(ops=tuple(ops), buffers=_buffers(spec), logits="logits")


def _buffers(spec: ModelSpec) -> dict[BufferName, Buffer]:
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "residual": Buffer(width=spec.hidden_size, rows="token"),
        "branch": Buffer(width=spec.hidden_size, rows="token"),
        "qkv": Buffer(width=q_width + 2 * kv_width, rows="token"),
        "attended": Buffer(width=q_width, rows="token"),
        "gate_up": Buffer(width=2 * spec.intermediate_size, rows="token"),
        "activated": Buffer(width=spec.intermediate_size, rows="token"),
        "selected": Buffer(width=spec.hidden_size, rows="selected"),
        "logits": Buffer(width=spec.vocab_size, rows="selected"),
    }


def _attention(spec: ModelSpec, layer: int, window: int | None) -> list[Op]:
    names = f"layers.{layer}."
    ops: list[Op] = [
        RmsNorm(x="residual", out="branch", weight=names + "attn_norm", eps=spec.norm_eps),
        _linear("branch", "qkv", names, ("q", "k", "v"), has_bias=spec.qkv_bias),
    ]
    if spec.qk_norm:
        offset = 0
        for name, num_heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
            ops.append(
                HeadRmsNorm(
                    x="qkv",
                    offset=offset,
                    num_heads=num_heads,
                    head_dim=spec.head_dim,
                    weight=names + name,
                    eps=spec.norm_eps,
                )
            )
            offset += num_heads * spec.head_dim
    return [
        *ops,
        RopeStore(qkv="qkv", layer=layer),
        Attend(qkv="qkv", out="attended", layer=layer, scale=spec.head_dim**-0.5, window=window),
        _linear("attended", "branch", names, ("o",), has_bias=spec.output_bias),
        Add(x="residual", y="branch"),
    ]


def _mlp(spec: ModelSpec, layer: int) -> list[Op]:
    names = f"layers.{layer}."
    return [
        RmsNorm(x="residual", out="branch", weight=names + "mlp_norm", eps=spec.norm_eps),
        _linear("branch", "gate_up", names, ("gate", "up"), has_bias=spec.mlp_bias),
        Activate(gate_up="gate_up", out="activated", kind="silu"),
        _linear("activated", "branch", names, ("down",), has_bias=spec.mlp_bias),
        Add(x="residual", y="branch"),
    ]


def _linear(x: BufferName, out: BufferName, prefix: WeightName, names: tuple[str, ...], *, has_bias: bool) -> Linear:
    """Several weights side by side: q, k and v (or gate and up) are one product."""
    weights = tuple(prefix + name for name in names)
    return Linear(x=x, out=out, weights=weights, biases=tuple(f"{w}_bias" for w in weights) if has_bias else ())
