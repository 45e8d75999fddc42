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
    Embed,
    HeadRmsNorm,
    Linear,
    Op,
    RmsNorm,
    RopeStore,
    SelectRows,
)
from octavo.models.rope import attention_scaling, inverse_frequencies
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

    def _run(self, op: Op, buffers: dict[BufferName, Floats], tokens: Indices, wanted: Indices) -> None:
        weights = self._weights
        match op:
            case Embed():
                buffers[op.out] = weights[op.weight][tokens] * np.float32(op.scale)
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
                self._rotate(buffers[op.qkv])
            case Attend():
                buffers[op.out] = self._attend(buffers[op.qkv], op)
            case Add():
                buffers[op.x] = buffers[op.x] + buffers[op.y]
            case Activate():
                gate, up = np.split(buffers[op.gate_up], 2, axis=1)
                buffers[op.out] = gate / (1 + np.exp(-gate)) * up
            case SelectRows():
                buffers[op.out] = buffers[op.x][wanted]

    def _rotate(self, qkv: Floats) -> None:
        """Turn q and k in place; without a cache nothing is stored."""
        spec = self.model.spec
        positions = np.arange(len(qkv), dtype=np.float64)
        angles = np.outer(positions, inverse_frequencies(spec.rope))
        scaling = attention_scaling(spec.rope)
        cos, sin = ((part * scaling).astype(np.float32)[:, None] for part in (np.cos(angles), np.sin(angles)))
        num_rotated = spec.num_heads + spec.num_kv_heads
        heads = qkv[:, : num_rotated * spec.head_dim].reshape(len(qkv), num_rotated, spec.head_dim)
        first, second = np.split(heads, 2, axis=2)
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
        qkv[:, : num_rotated * spec.head_dim] = turned.reshape(len(qkv), -1)

    def _attend(self, qkv: Floats, op: Attend) -> Floats:
        spec, length = self.model.spec, len(qkv)
        heads = qkv.reshape(length, -1, spec.head_dim).swapaxes(0, 1)
        group = spec.num_heads // spec.num_kv_heads
        q = heads[: spec.num_heads]
        k, v = np.split(heads[spec.num_heads :].repeat(group, axis=0), 2)
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        hidden = (distance < 0) | (distance >= (op.window or math.inf))
        scores = np.where(hidden, np.float32(-np.inf), q @ k.swapaxes(1, 2) * np.float32(op.scale))
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        mixed: Floats = (shares @ v).swapaxes(0, 1).reshape(length, -1)
        return mixed


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed
