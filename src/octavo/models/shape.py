"""ModelShape: what counting bytes needs to know of a model, whether or not this engine runs it.

A `ModelSpec` describes a model that is executed; a shape describes any published model: what each layer keeps per
token or per request, and every weight tensor by its size. Frozen data without tensors or I/O; widths are numbers of
elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.models.packing import Packing
from octavo.models.weight_tensor import TensorRole, WeightTensor

__all__ = ["KVKind", "Layer", "LayerKV", "LayerState", "ModelShape", "TensorRole", "WeightTensor"]

KVKind = Literal["full", "sliding", "chunked", "latent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """What one token leaves in the KV cache of one layer.

    Args:
        kind: `latent` layers keep one compressed vector for all heads, which serves as key and as value.
        num_kv_heads: Heads that are stored; 1 for latent layers.
        key_dim, value_dim: Elements per head; a latent layer's vector is counted as the key, its value takes none.
        window: Tokens a query sees, its own included (sliding), or tokens of a chunk (chunked); `None` means all.
        index_bytes: Bytes per token that a sparse-attention indexer keeps besides, whatever the KV dtype.
        rope_dim: Of a latent vector, the elements that carry the position.
        expanded_dim: Elements of a key head before compression, for engines that cache latent layers as full heads.
        tokens_per_entry: Tokens that one entry of the cache stands for; 1 unless a layer merges tokens.
    """

    kind: KVKind
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    index_bytes: int = 0
    rope_dim: int = 0
    expanded_dim: int = 0
    tokens_per_entry: int = 1

    @property
    def num_elements(self) -> int:
        """Elements of one token: keys and values of all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """What one request keeps in a recurrent layer, whatever its length.

    Args:
        conv_elements: Last inputs of the convolution, in the dtype of the weights.
        recurrent_elements: The state that every token updates.
        is_wide: The recurrent state is kept in float32; else in the dtype of the weights.
    """

    conv_elements: int
    recurrent_elements: int
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: it keeps keys and values, or a state, or nothing (an MLP of its own).

    `local` is a window of whole tokens beside entries that stand for many (DeepSeek V4).
    """

    kv: LayerKV | None = None
    state: LayerState | None = None
    local: LayerKV | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as the planner sees it.

    Args:
        dtype: How unquantised weights are stored, as the config names it (`bfloat16`).
        quantization: The config's own scheme (`awq`, `gptq`, `fp8`, `compressed-tensors`, `mxfp4` ...); empty if none.
        num_heads: Query heads of an attention layer.
        max_position: The most tokens the model was made for.
        layers: In order.
        tensors: Every weight, a tied head counted once.
        intermediate_size: Widest inner width of an MLP that one token passes.
        is_tied: The head is the embedding table.
        uncounted: Parts that the model has and the config does not size, e.g. `vision tower`; empty when all is
            counted.
        packing: How the scheme stores what it quantises; `None` if nothing is.
    """

    name: str
    architecture: str
    dtype: str
    quantization: str = ""
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_position: int
    layers: tuple[Layer, ...]
    tensors: tuple[WeightTensor, ...]
    intermediate_size: int = 0
    is_tied: bool = False
    uncounted: tuple[str, ...] = ()
    packing: Packing | None = None

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def has_learned_positions(self) -> bool:
        """Whether positions are looked up in a table, so that there are none beyond it."""
        return any(tensor.name == "wpe.weight" for tensor in self.tensors)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts it is not routed to.

        An embedding table counts in full, as published figures count it.
        """
        return sum(tensor.num_active_elements for tensor in self.tensors)
