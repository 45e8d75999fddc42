"""WeightTensor: weights of one size, counted; how ranks divide them, and whether quantisation packs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TensorRole = Literal["embedding", "head", "attention", "mlp", "expert", "router", "state", "norm", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """`count` tensors of one size, e.g. the same projection of all layers, or of all experts of all layers.

    Args:
        name: The tensor's name with `*` for layer and expert numbers.
        rows, columns: A vector has one row; a projection has a row per output.
        num_active: How many of `count` one token uses; fewer for experts of a mixture.
        layers: The layers that hold them, `count / len(layers)` each; empty for tensors outside all layers.
        num_shards: The most ranks that tensor parallelism can divide one over (heads, rows of a table); with more
            ranks, several hold the same shard. 1: every rank holds the whole.
        is_linear: The matrix of a linear layer, which weight quantisation packs; all else stays as it is.
    """

    name: str
    role: TensorRole
    rows: int
    columns: int
    count: int = 1
    num_active: int | None = None
    layers: tuple[int, ...] = ()
    num_shards: int = 1
    is_linear: bool = False

    @property
    def num_elements(self) -> int:
        return self.rows * self.columns * self.count

    @property
    def num_active_elements(self) -> int:
        """Elements that one token uses: all but those of experts it is not routed to."""
        return self.rows * self.columns * (self.count if self.num_active is None else self.num_active)
