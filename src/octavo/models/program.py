"""A model as data: a flat list of ops over named buffers.

`models/` turns a config into a `Program`; a runner executes it. The reference runner interprets it op by op in NumPy,
the native runner hands the whole list to C++ once and runs it in one call per step. A new architecture is a new list,
not new code in a runner.

Every buffer is a float32 matrix `[rows, width]`. Buffers before `SelectRows` have one row per token of the step,
buffers written by `SelectRows` and later ops one row per *selected* token (the rows whose logits are wanted). Weights
are named by canonical tensor names (`layers.0.q`, `embed`, ...; see `names.py`); the emitter never sees their bytes.

Ops are the contract between `models` and `runtime`; each docstring is the definition both runners implement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.models.spec import ActivationKind

BufferName = str
WeightName = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """`out[t] = weight[token_ids[t]] * scale`. weight `[vocab_size, hidden_size]`."""

    out: BufferName
    weight: WeightName
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPosition:
    """`out[t] = weight[position[t]]`. weight `[max_position, width(out)]` (learned positions)."""

    out: BufferName
    weight: WeightName


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """`out[t] = (x[t] - mean) / sqrt(mean((x[t] - mean)^2) + eps) * weight + bias`; vectors `[width]`.

    `x` and `out` may be the same buffer.
    """

    x: BufferName
    out: BufferName
    weight: WeightName
    bias: WeightName
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """`out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight`. weight `[width]`; `x` and `out` may be the same buffer."""

    x: BufferName
    out: BufferName
    weight: WeightName
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRmsNorm:
    """RMS norm in place over each head of a slice of a buffer (Qwen3's q and k norms).

    Columns `[offset, offset + num_heads * head_dim)` of `x` are `num_heads` vectors, each normalised on its own with
    the same `weight` `[head_dim]`. With one head as wide as all, they are normalised together (OLMo 2).
    """

    x: BufferName
    offset: int
    num_heads: int
    head_dim: int
    weight: WeightName
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`out[t] = concat_i(weights[i] @ x[t]) + concat_i(biases[i])`.

    Several weights `[n_i, width(x)]` read the same input and write side by side, so that q, k, v (or gate, up) are one
    product. `biases` is empty or as long as `weights`, each bias `[n_i]`.
    """

    x: BufferName
    out: BufferName
    weights: tuple[WeightName, ...]
    biases: tuple[WeightName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeStore:
    """Rotate q and k of one layer by position, and write k and v of each token into its slot of the KV cache.

    `qkv` rows are `[num_heads * head_dim | num_kv_heads * head_dim | num_kv_heads * head_dim]`. q is rotated in place;
    the rotated k and the plain v go to the cache (rounded to the KV dtype there; before an int4 cache q, k and v are
    Hadamard-transformed after the rotation, and `Attend` undoes it on what it reads). Rotation pairs dimension `i` with
    `i + rotary_dim / 2` ("half" pairing, as in Hugging Face models; GGUF files of the Llama family store q and k
    permuted for the other pairing, and the loader undoes that). Angles come from `Rope`. Angle, cosine and sine are
    computed in double precision and rounded once to float32, so that all runners agree to the bit. Layers with
    `is_local` are rotated by the spec's `local_rope`. A rope without width rotates nothing.

    Args:
        sink_q: `[rows, num_heads * head_dim]`; filled with q rotated by `sink_position` instead of its own position.
            Only of layers with sinks.
    """

    qkv: BufferName
    layer: int
    is_local: bool = False
    sink_q: BufferName | None = None
    sink_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Causal attention of each query token over its request's cached tokens, through the block table.

    `qkv` holds the rotated q; `out` is `[rows, num_heads * head_dim]`. For query position p of a layer without window,
    keys 0..p are visible; with window w, keys max(0, p - w + 1)..p. Query head h reads KV head
    `h // (num_heads // num_kv_heads)`. `score = (q . k) * scale`, with a softcap c then `c * tanh(score / c)`; softmax
    in float32; `out = sum softmax * v`.

    With `sparse_blocks` n, a query at position p reads the 16-token tiles 0 and p // 16 and the n - 2 others before it
    with the highest `sum_d max(q_d * low_d, q_d * high_d)`, the lower tile where two are equal; `low` and `high` are
    the least and greatest of its keys' dimensions as stored, rounded outward to bf16. See `models/sparse.py`.
    With S sinks beside a window w, queries at p < S + w see keys 0..p. From p = S + w on they see keys 0..S - 1, scored
    with `sink_q`, and keys p - w + 1..p, scored with q, in one softmax. `sink_q` is q rotated by S + w - 1: sinks keep
    the distance that they had when the window last followed them.

    Source: attention sinks and positions inside the cache, Xiao et al., arXiv:2309.17453.
    """

    qkv: BufferName
    out: BufferName
    layer: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sparse_blocks: int = 0
    num_sinks: int = 0
    sink_q: BufferName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """`x[t] += y[t]` (the residual sum)."""

    x: BufferName
    y: BufferName


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate:
    """Apply f to each part of a row; with `has_gate` a part is `gate | up` and becomes `f(gate) * up`.

    Rows of `x` and `out` consist of `num_parts` equal parts (one per active expert of a mixture). f is silu,
    `x / (1 + exp(-x))`, or gelu_tanh, `x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))`, which is GELU's tanh form.
    """

    x: BufferName
    out: BufferName
    kind: ActivationKind
    has_gate: bool = True
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCap:
    """`x[t] = cap * tanh(x[t] / cap)`, in place."""

    x: BufferName
    cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Choose each token's experts from the router's scores `[rows, num_experts]`.

    `out[t] = ids | weights`, `num_active` each, in the order of falling score (the lower id first where scores are
    equal). Weights are the softmax over all experts, divided by the sum of the chosen ones if `is_normalised`.
    """

    x: BufferName
    out: BufferName
    num_active: int
    is_normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLinear:
    """For each token and each place s of its route: `out[t, s] = concat_i(weights[e][i] @ x[t, s])`, e = the expert.

    Args:
        x: `[rows, width]`, which all places read, or `[rows, num_active * width]` with `is_split`.
        out: `[rows, num_active * n]`.
        weights: For each expert the weights that lie side by side in one product, as in `Linear`.
        gathered, product: Room for the rows of one expert before and after its product: `[rows, width]`, `[rows, n]`.
    """

    x: BufferName
    routes: BufferName
    out: BufferName
    weights: tuple[tuple[WeightName, ...], ...]
    num_active: int
    is_split: bool
    gathered: BufferName
    product: BufferName


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine:
    """`out[t] = sum over places s of weight[t, s] * x[t, s]`, from the first place to the last.

    `x` is `[rows, num_active * width(out)]`; weights come from `Route`.
    """

    x: BufferName
    routes: BufferName
    out: BufferName
    num_active: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectRows:
    """`out[i] = x[row_i]` for the rows whose logits are wanted, in the order of the step plan."""

    x: BufferName
    out: BufferName


Op = (
    Embed
    | EmbedPosition
    | LayerNorm
    | RmsNorm
    | HeadRmsNorm
    | Linear
    | RopeStore
    | Attend
    | Add
    | Activate
    | SoftCap
    | Route
    | ExpertLinear
    | Combine
    | SelectRows
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A float32 matrix; `rows` says whether it has a row per token or per selected token."""

    width: int
    rows: Literal["token", "selected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Ops in order, the buffers they use, and the buffer that holds the logits `[selected, vocab_size]` at the end."""

    ops: tuple[Op, ...]
    buffers: dict[BufferName, Buffer] = field(hash=False)
    logits: BufferName


def product_weights(op: Op) -> tuple[WeightName, ...]:
    """Return the weights that an op multiplies its input with."""
    match op:
        case Linear():
            return op.weights
        case ExpertLinear():
            return tuple(name for names in op.weights for name in names)
        case _:
            return ()


def vector_weights(op: Op) -> tuple[WeightName, ...]:
    """Return the vectors that an op applies element by element."""
    match op:
        case RmsNorm() | HeadRmsNorm():
            return (op.weight,)
        case LayerNorm():
            return (op.weight, op.bias)
        case _:
            return ()
