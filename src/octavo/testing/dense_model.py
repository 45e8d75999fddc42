"""The plainest meaning of a `Program`: whole sequences, no cache, no blocks, float32 NumPy.

An oracle that shares nothing with the runners but the program and the weights. It computes one sequence at a time with
dense causal attention, in about sixty lines; where it and a paged runner disagree, the pages are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.models.load import OpenedModel, open_model
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    BufferName,
    Combine,
    Embed,
    EmbedPosition,
    ExpertLinear,
    HeadRmsNorm,
    LayerNorm,
    Linear,
    Op,
    RmsNorm,
    RopeStore,
    Route,
    SelectRows,
    SoftCap,
)
from octavo.models.rope import attention_scaling, inverse_frequencies
from octavo.models.spec import Rope
from octavo.models.weights import WeightSource

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class DenseModel:
    """A model whose logits come from one dense pass.

        logits = DenseModel.load(path).logits([1, 2, 3])        # [3, vocab_size], one row per position

    Args:
        model: As opened.
        weights: Float32 values by our tensor names.
        product_input: Changes what a matrix product is given: quantises it, say.
    """

    def __init__(
        self,
        model: OpenedModel,
        weights: Mapping[str, Floats],
        *,
        product_input: Callable[[Linear, Floats], Floats] | None = None,
    ) -> None:
        self.model = model
        self._weights = weights
        self._product_input = product_input

    @staticmethod
    def load(path: Path) -> DenseModel:
        model = open_model(path)
        with WeightSource(model) as source:
            return DenseModel(model, {tensor.name: tensor.to_f32() for tensor in source.read_all()})

    def logits(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> Floats:
        """Return the logits after each token, or after the tokens at `rows` only."""
        tokens = np.asarray(token_ids)
        wanted = np.asarray(range(len(tokens)) if rows is None else rows)
        buffers: dict[BufferName, Floats] = {}
        for op in self.model.program.ops:
            self._run(op, buffers, tokens, wanted)
        return buffers[self.model.program.logits]

    def _run(  # noqa: C901, PLR0912 - one case for each kind of op
        self, op: Op, buffers: dict[BufferName, Floats], tokens: Indices, wanted: Indices
    ) -> None:
        weights = self._weights
        match op:
            case Embed():
                buffers[op.out] = weights[op.weight][tokens] * np.float32(op.scale)
            case EmbedPosition():
                buffers[op.out] = weights[op.weight][: len(tokens)]
            case LayerNorm():
                x = buffers[op.x]
                normed = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + op.eps)
                buffers[op.out] = normed * weights[op.weight] + weights[op.bias]
            case RmsNorm():
                buffers[op.out] = _rms_norm(buffers[op.x], weights[op.weight], op.eps)
            case HeadRmsNorm():
                columns = slice(op.offset, op.offset + op.num_heads * op.head_dim)
                heads = buffers[op.x][:, columns].reshape(len(tokens), op.num_heads, op.head_dim)
                buffers[op.x][:, columns] = _rms_norm(heads, weights[op.weight], op.eps).reshape(len(tokens), -1)
            case Linear():
                x = buffers[op.x] if self._product_input is None else self._product_input(op, buffers[op.x])
                parts = [x @ weights[name].T for name in op.weights]
                if op.biases:
                    parts = [part + weights[name] for part, name in zip(parts, op.biases, strict=True)]
                buffers[op.out] = np.concatenate(parts, axis=1)
            case RopeStore():
                positions = np.arange(len(tokens), dtype=np.float64)
                if op.sink_q is not None:
                    at_sink = buffers[op.qkv].copy()
                    self._rotate(at_sink, self._rope(op), np.full_like(positions, op.sink_position))
                    buffers[op.sink_q] = at_sink[:, : self.model.spec.num_heads * self.model.spec.head_dim]
                self._rotate(buffers[op.qkv], self._rope(op), positions)
            case Attend():
                buffers[op.out] = self._attend(buffers[op.qkv], op, buffers[op.sink_q] if op.sink_q else None)
            case Add():
                buffers[op.x] = buffers[op.x] + buffers[op.y]
            case Activate():
                parts = [_activate(op, part) for part in np.split(buffers[op.x], op.num_parts, axis=1)]
                buffers[op.out] = np.concatenate(parts, axis=1)
            case SoftCap():
                buffers[op.x] = np.float32(op.cap) * np.tanh(buffers[op.x] / np.float32(op.cap))
            case Route():
                buffers[op.out] = _route(op, buffers[op.x])
            case ExpertLinear():
                buffers[op.out] = self._experts(op, buffers[op.x], buffers[op.routes])
            case Combine():
                parts = np.split(buffers[op.x], op.num_active, axis=1)
                weights_of_places = buffers[op.routes].T[op.num_active :, :, None]
                buffers[op.out] = np.sum(np.stack(parts) * weights_of_places, axis=0)
            case SelectRows():
                buffers[op.out] = buffers[op.x][wanted]

    def _experts(self, op: ExpertLinear, x: Floats, routes: Floats) -> Floats:
        """Token by token, place by place."""
        rows = []
        for row, route in zip(x, routes, strict=True):
            parts = np.split(row, op.num_active) if op.is_split else [row] * op.num_active
            experts = route[: op.num_active].astype(int)
            rows.append(
                np.concatenate(
                    [
                        self._weights[name] @ part
                        for expert, part in zip(experts, parts, strict=True)
                        for name in op.weights[expert]
                    ]
                )
            )
        return np.stack(rows)

    def _rope(self, op: RopeStore) -> Rope:
        spec = self.model.spec
        return spec.local_rope if op.is_local and spec.local_rope is not None else spec.rope

    def _rotate(self, qkv: Floats, rope: Rope, positions: npt.NDArray[np.float64]) -> None:
        """Turn q and k in place; without a cache nothing is stored."""
        spec = self.model.spec
        if not rope.rotary_dim:
            return
        angles = np.outer(positions, inverse_frequencies(rope))
        scaling = attention_scaling(rope)
        cos, sin = ((part * scaling).astype(np.float32)[:, None] for part in (np.cos(angles), np.sin(angles)))
        num_rotated = spec.num_heads + spec.num_kv_heads
        heads = qkv[:, : num_rotated * spec.head_dim].reshape(len(qkv), num_rotated, spec.head_dim)
        half = rope.rotary_dim // 2
        first, second, rest = np.split(heads, [half, 2 * half], axis=2)
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=2)
        qkv[:, : num_rotated * spec.head_dim] = turned.reshape(len(qkv), -1)

    def _attend(self, qkv: Floats, op: Attend, sink_q: Floats | None) -> Floats:
        spec, length = self.model.spec, len(qkv)
        heads = qkv.reshape(length, -1, spec.head_dim).swapaxes(0, 1)
        group = spec.num_heads // spec.num_kv_heads
        q = heads[: spec.num_heads]
        k, v = np.split(heads[spec.num_heads :].repeat(group, axis=0), 2)
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        hidden = (distance < 0) | (distance >= (op.window or math.inf))
        scores = q @ k.swapaxes(1, 2) * np.float32(op.scale)
        if sink_q is not None and op.window is not None:
            hidden[:, : op.num_sinks] = False
            hidden[distance < 0] = True
            behind_gap = slice(op.num_sinks + op.window, None)
            at_sink = sink_q.reshape(length, -1, spec.head_dim).swapaxes(0, 1) @ k.swapaxes(1, 2) * np.float32(op.scale)
            scores[:, behind_gap, : op.num_sinks] = at_sink[:, behind_gap, : op.num_sinks]
        if op.softcap:
            scores = np.float32(op.softcap) * np.tanh(scores / np.float32(op.softcap))
        scores = np.where(hidden, np.float32(-np.inf), scores)
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        mixed: Floats = (shares @ v).swapaxes(0, 1).reshape(length, -1)
        return mixed


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def _activate(op: Activate, x: Floats) -> Floats:
    gate, up = np.split(x, 2, axis=1) if op.has_gate else (x, np.ones_like(x))
    if op.kind == "silu":
        silu: Floats = gate / (1 + np.exp(-gate)) * up
        return silu
    inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
    activated: Floats = np.float32(0.5) * gate * (1 + np.tanh(inner)) * up
    return activated


def _route(op: Route, scores: Floats) -> Floats:
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    ids = np.argsort(-shares, axis=1, kind="stable")[:, : op.num_active]
    chosen = np.take_along_axis(shares, ids, axis=1)
    if op.is_normalised:
        chosen /= chosen.sum(axis=1, keepdims=True)
    return np.concatenate([ids.astype(np.float32), chosen], axis=1)
