"""Parts that many families share: attention with query, key and value heads, and the two kinds of MLP."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.shape import Layer, LayerKV
from octavo.models.shapes.draft import ShapeDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Heads of one attention layer, and which of its projections have biases.

    Args:
        value_dim: Elements of a value head; 0 means as many as a key head.
        window: Tokens a query sees; `None` means all.
        chunk: Tokens of a chunk that a query does not look out of; `None` means no chunks.
        qk_norm_widths: Widths of norms on queries and on keys; empty where there are none.
        has_gate: The query projection is twice as wide; its second half gates the output.
        is_value_key: Values are the keys: there is no value projection, but both are cached.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    window: int | None = None
    chunk: int | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm_widths: tuple[int, ...] = ()
    has_gate: bool = False
    is_value_key: bool = False

    @property
    def kv(self) -> LayerKV:
        """What a token leaves in the cache."""
        kind = "chunked" if self.chunk is not None else "sliding" if self.window is not None else "full"
        return LayerKV(
            kind=kind,  # type: ignore[arg-type]
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            window=self.chunk if self.chunk is not None else self.window,
        )


def add_attention(draft: ShapeDraft, layer: int, attention: Attention) -> Layer:
    """Count q, k, v, o and their norms of one layer; return what the layer keeps."""
    heads, kv_heads, key_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    value_dim, hidden = attention.value_dim or key_dim, draft.hidden_size
    bias = attention.has_qkv_bias
    q_rows = heads * key_dim * (2 if attention.has_gate else 1)
    draft.linear("layers.*.q_proj", "attention", q_rows, hidden, layer=layer, num_shards=heads, has_bias=bias)
    draft.linear(
        "layers.*.k_proj", "attention", kv_heads * key_dim, hidden, layer=layer, num_shards=kv_heads, has_bias=bias
    )
    if not attention.is_value_key:
        draft.linear(
            "layers.*.v_proj",
            "attention",
            kv_heads * value_dim,
            hidden,
            layer=layer,
            num_shards=kv_heads,
            has_bias=bias,
        )
    draft.linear(
        "layers.*.o_proj",
        "attention",
        hidden,
        heads * value_dim,
        layer=layer,
        num_shards=heads,
        bias_shards=1,
        has_bias=attention.has_output_bias,
    )
    for name, width in zip(("q_norm", "k_norm"), attention.qk_norm_widths, strict=False):
        draft.norm(f"layers.*.{name}", width, layer=layer)
    return Layer(kv=attention.kv)


def add_gated_mlp(
    draft: ShapeDraft, layer: int, width: int, *, name: str = "mlp", has_bias: bool = False, is_parallel: bool = True
) -> None:
    """Count gate, up and down of one layer."""
    draft.raise_intermediate_size(width)
    hidden, shards = draft.hidden_size, width if is_parallel else 1
    for part in ("gate_proj", "up_proj"):
        draft.linear(f"layers.*.{name}.{part}", "mlp", width, hidden, layer=layer, num_shards=shards, has_bias=has_bias)
    _add_down(draft, layer, f"layers.*.{name}.down_proj", width, shards=shards, has_bias=has_bias)


def add_plain_mlp(draft: ShapeDraft, layer: int, width: int, *, name: str = "mlp", has_bias: bool = True) -> None:
    """Count up and down of one layer without a gate."""
    draft.raise_intermediate_size(width)
    draft.linear(
        f"layers.*.{name}.up_proj",
        "mlp",
        width,
        draft.hidden_size,
        layer=layer,
        num_shards=width,
        has_bias=has_bias,
    )
    _add_down(draft, layer, f"layers.*.{name}.down_proj", width, shards=width, has_bias=has_bias)


def _add_down(draft: ShapeDraft, layer: int, name: str, width: int, *, shards: int, has_bias: bool) -> None:
    draft.linear(
        name, "mlp", draft.hidden_size, width, layer=layer, num_shards=shards, bias_shards=1, has_bias=has_bias
    )


def add_experts(
    draft: ShapeDraft,
    layer: int,
    width: int,
    *,
    num_experts: int,
    num_active: int,
    has_bias: bool = False,
    has_router_bias: bool = False,
    has_gate: bool = True,
    input_size: int | None = None,
) -> None:
    """Count a router and `num_experts` experts of one layer, of which a token uses `num_active`.

    Args:
        has_gate: The experts have gate, up and down; else only up and down.
        input_size: Width of the experts' input where it is not the hidden size.
    """
    draft.raise_intermediate_size(width * num_active)
    hidden = draft.hidden_size
    inner = hidden if input_size is None else input_size
    draft.add("layers.*.router.weight", "router", num_experts, hidden, layer=layer)
    if has_router_bias:
        draft.add("layers.*.router.bias", "router", 1, num_experts, layer=layer)
    for part in ("gate_proj", "up_proj") if has_gate else ("up_proj",):
        draft.linear(
            f"layers.*.experts.*.{part}",
            "expert",
            width,
            inner,
            layer=layer,
            count=num_experts,
            num_active=num_active,
            num_shards=width,
            has_bias=has_bias,
        )
    draft.linear(
        "layers.*.experts.*.down_proj",
        "expert",
        inner,
        width,
        layer=layer,
        count=num_experts,
        num_active=num_active,
        num_shards=width,
        bias_shards=1,
        has_bias=has_bias,
    )
