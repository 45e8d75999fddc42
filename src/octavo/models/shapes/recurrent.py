"""Recurrent layers: a state per request instead of keys and values per token.

Two tensors are kept: the last inputs of a short convolution, and the recurrent state. In the layers here, `is_wide`
says that the recurrent state is kept in float32, where a family's files ask for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.shape import Layer, LayerState
from octavo.models.shapes.draft import ShapeDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta rule layer (Qwen3-Next and later): a matrix per value head, updated by every token."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_wide: bool = False

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> LayerState:
        return LayerState(
            conv_elements=self.conv_width * (self.kernel - 1),
            recurrent_elements=self.num_value_heads * self.key_dim * self.value_dim,
            is_wide=self.is_wide,
        )


def add_delta_net(draft: ShapeDraft, layer: int, net: DeltaNet) -> Layer:
    """Count one layer: projections to q, k, v and gate, to the two rates, the convolution and the output."""
    hidden, heads = draft.hidden_size, net.num_value_heads
    name = "layers.*.linear_attn"
    draft.linear(
        f"{name}.in_proj_qkvz",
        "state",
        net.conv_width + net.value_width,
        hidden,
        layer=layer,
        num_shards=net.num_key_heads,
    )
    draft.linear(f"{name}.in_proj_ba", "state", 2 * heads, hidden, layer=layer, num_shards=net.num_key_heads)
    draft.add(f"{name}.conv1d.weight", "state", net.conv_width, net.kernel, layer=layer, num_shards=net.num_key_heads)
    draft.add(f"{name}.dt_bias", "state", 1, heads, layer=layer, num_shards=heads)
    draft.add(f"{name}.A_log", "state", 1, heads, layer=layer, num_shards=heads)
    draft.norm(f"{name}.norm", net.value_dim, layer=layer)
    draft.linear(f"{name}.out_proj", "state", hidden, net.value_width, layer=layer, num_shards=heads)
    return Layer(state=net.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A Mamba 2 layer: heads of `head_dim` channels with a state of `state_dim` each, in groups that share B and C."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    kernel: int
    has_conv_bias: bool = True
    has_bias: bool = False
    is_wide: bool = False

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.num_groups * self.state_dim

    @property
    def state(self) -> LayerState:
        return LayerState(
            conv_elements=self.conv_width * (self.kernel - 1),
            recurrent_elements=self.width * self.state_dim,
            is_wide=self.is_wide,
        )


def add_mamba2(draft: ShapeDraft, layer: int, mamba: Mamba2) -> Layer:
    """Count one layer."""
    name, heads = "layers.*.mamba", mamba.num_heads
    rows = mamba.width + mamba.conv_width + heads
    bias = mamba.has_bias
    draft.linear(f"{name}.in_proj", "state", rows, draft.hidden_size, layer=layer, num_shards=heads, has_bias=bias)
    draft.add(f"{name}.conv1d.weight", "state", mamba.conv_width, mamba.kernel, layer=layer, num_shards=heads)
    if mamba.has_conv_bias:
        draft.add(f"{name}.conv1d.bias", "state", 1, mamba.conv_width, layer=layer, num_shards=heads)
    for vector in ("dt_bias", "A_log", "D"):
        draft.add(f"{name}.{vector}", "state", 1, heads, layer=layer, num_shards=heads)
    draft.add(f"{name}.norm.weight", "norm", 1, mamba.width, layer=layer, num_shards=heads)
    draft.linear(
        f"{name}.out_proj",
        "state",
        draft.hidden_size,
        mamba.width,
        layer=layer,
        num_shards=heads,
        bias_shards=1,
        has_bias=bias,
    )
    return Layer(state=mamba.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """A Mamba 1 layer as Jamba has it, with norms on the step size, B and C."""

    width: int
    state_dim: int
    dt_rank: int
    kernel: int
    has_conv_bias: bool = True
    has_bias: bool = False

    @property
    def state(self) -> LayerState:
        return LayerState(conv_elements=self.width * (self.kernel - 1), recurrent_elements=self.width * self.state_dim)


def add_mamba1(draft: ShapeDraft, layer: int, mamba: Mamba1) -> Layer:
    """Count one layer."""
    name, width, shards = "layers.*.mamba", mamba.width, mamba.width
    bias = mamba.has_bias
    draft.linear(
        f"{name}.in_proj", "state", 2 * width, draft.hidden_size, layer=layer, num_shards=shards, has_bias=bias
    )
    draft.add(f"{name}.conv1d.weight", "state", width, mamba.kernel, layer=layer, num_shards=shards)
    if mamba.has_conv_bias:
        draft.add(f"{name}.conv1d.bias", "state", 1, width, layer=layer, num_shards=shards)
    rows = mamba.dt_rank + 2 * mamba.state_dim
    draft.linear(f"{name}.x_proj", "state", rows, width, layer=layer, num_shards=shards)
    draft.linear(f"{name}.dt_proj", "state", width, mamba.dt_rank, layer=layer, num_shards=shards, has_bias=True)
    draft.add(f"{name}.A_log", "state", width, mamba.state_dim, layer=layer, num_shards=shards)
    draft.add(f"{name}.D", "state", 1, width, layer=layer, num_shards=shards)
    for vector, length in (("dt", mamba.dt_rank), ("b", mamba.state_dim), ("c", mamba.state_dim)):
        draft.norm(f"{name}.{vector}_layernorm", length, layer=layer)
    draft.linear(
        f"{name}.out_proj",
        "state",
        draft.hidden_size,
        width,
        layer=layer,
        num_shards=shards,
        bias_shards=1,
        has_bias=bias,
    )
    return Layer(state=mamba.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta:
    """A Kimi delta attention layer: a delta rule with a forget rate per channel."""

    num_heads: int
    head_dim: int
    kernel: int

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def state(self) -> LayerState:
        return LayerState(
            conv_elements=3 * self.width * (self.kernel - 1),
            recurrent_elements=self.num_heads * self.head_dim * self.head_dim,
            is_wide=True,
        )


def add_kimi_delta(draft: ShapeDraft, layer: int, delta: KimiDelta) -> Layer:
    """Count one layer."""
    name, hidden, heads, width = "layers.*.linear_attn", draft.hidden_size, delta.num_heads, delta.width
    for part in ("q_proj", "k_proj", "v_proj"):
        draft.linear(f"{name}.{part}", "state", width, hidden, layer=layer, num_shards=heads)
    draft.add(f"{name}.conv1d.weight", "state", 3 * width, delta.kernel, layer=layer, num_shards=heads)
    draft.add(f"{name}.dt_bias", "state", 1, width, layer=layer, num_shards=heads)
    draft.add(f"{name}.A_log", "state", 1, heads, layer=layer, num_shards=heads)
    for part in ("f", "g"):
        draft.linear(f"{name}.{part}_a_proj", "state", delta.head_dim, hidden, layer=layer)
        draft.linear(f"{name}.{part}_b_proj", "state", width, delta.head_dim, layer=layer, num_shards=heads)
    draft.linear(f"{name}.b_proj", "state", heads, hidden, layer=layer, num_shards=heads)
    draft.norm(f"{name}.o_norm", delta.head_dim, layer=layer)
    draft.linear(f"{name}.o_proj", "state", hidden, width, layer=layer, num_shards=heads)
    return Layer(state=delta.state)
