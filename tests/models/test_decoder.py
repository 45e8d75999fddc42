"""Programs: every op reads and writes buffers and weights of the widths it needs."""

from __future__ import annotations

import pytest

from octavo.models.config import spec_from_hf
from octavo.models.decoder import emit_decoder
from octavo.models.names import tensor_shapes
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    Embed,
    HeadRmsNorm,
    Linear,
    RmsNorm,
    RopeStore,
    SelectRows,
)
from octavo.testing.tiny_models import TinyModel, make_config

MODELS = {
    "llama": TinyModel(num_layers=3),
    "tied": TinyModel(tie_embeddings=True),
    "biases": TinyModel(attention_bias=True, mlp_bias=True),
    "window": TinyModel(architecture="mistral", sliding_window=20),
    "qwen2": TinyModel(architecture="qwen2"),
    "qwen3": TinyModel(architecture="qwen3", head_dim=32, num_kv_heads=1),
    "odd widths": TinyModel(num_heads=3, num_kv_heads=1, hidden_size=48, head_dim=10, intermediate_size=50),
}


def spec_of(model, **changes):
    return spec_from_hf(make_config(model) | changes, where="config.json", name="tiny")


@pytest.mark.parametrize("name", MODELS)
def test_widths_of_buffers_and_weights_agree_in_every_op(name):
    spec = spec_of(MODELS[name])
    program, shapes = emit_decoder(spec), tensor_shapes(spec)
    width = {name: buffer.width for name, buffer in program.buffers.items()}
    rows = {name: buffer.rows for name, buffer in program.buffers.items()}
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    used, written = set(), set()

    for op in program.ops:
        match op:
            case Embed():
                assert shapes[op.weight] == (spec.vocab_size, width[op.out])
                used.add(op.weight)
            case RmsNorm():
                assert shapes[op.weight] == (width[op.x],) == (width[op.out],)
                assert rows[op.x] == rows[op.out]
                used.add(op.weight)
            case HeadRmsNorm():
                assert shapes[op.weight] == (op.head_dim,)
                assert op.offset + op.num_heads * op.head_dim <= width[op.x]
                used.add(op.weight)
            case Linear():
                assert [shapes[weight][1] for weight in op.weights] == [width[op.x]] * len(op.weights)
                assert sum(shapes[weight][0] for weight in op.weights) == width[op.out]
                assert [shapes[bias] for bias in op.biases] == [shapes[w][:1] for w in op.weights[: len(op.biases)]]
                assert len(op.biases) in (0, len(op.weights))
                assert rows[op.x] == rows[op.out]
                used |= {*op.weights, *op.biases}
            case RopeStore():
                assert width[op.qkv] == q_width + 2 * kv_width
            case Attend():
                assert (width[op.qkv], width[op.out]) == (q_width + 2 * kv_width, q_width)
                assert op.scale == spec.head_dim**-0.5
            case Add():
                assert (width[op.x], rows[op.x]) == (width[op.y], rows[op.y])
            case Activate():
                assert width[op.x] == 2 * width[op.out]
            case SelectRows():
                assert width[op.x] == width[op.out]
                assert (rows[op.x], rows[op.out]) == ("token", "selected")
        inputs = {getattr(op, field) for field in ("x", "y", "qkv", "gate_up") if hasattr(op, field)}
        assert inputs <= written, f"{op} reads what nothing wrote"
        written |= {getattr(op, "out", None)} - {None}

    assert used == set(shapes), "every tensor is used"
    assert written == set(program.buffers), "every buffer is used"
    assert (width[program.logits], rows[program.logits]) == (spec.vocab_size, "selected")


def test_layers_store_and_attend_once_each_in_order():
    program = emit_decoder(spec_of(TinyModel(num_layers=4)))

    assert [op.layer for op in program.ops if isinstance(op, RopeStore)] == [0, 1, 2, 3]
    assert [op.layer for op in program.ops if isinstance(op, Attend)] == [0, 1, 2, 3]


def test_projections_that_read_the_same_input_are_one_product():
    program = emit_decoder(spec_of(TinyModel(architecture="qwen2", num_layers=1)))

    linears = [(op.weights, op.biases) for op in program.ops if isinstance(op, Linear)]
    assert linears[0] == (
        ("layers.0.q", "layers.0.k", "layers.0.v"),
        ("layers.0.q_bias", "layers.0.k_bias", "layers.0.v_bias"),
    )
    assert linears[2] == (("layers.0.gate", "layers.0.up"), ())


def test_windowed_layers_attend_within_their_window_only():
    config = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    program = emit_decoder(spec_of(TinyModel(architecture="qwen2"), **config))

    assert [op.window for op in program.ops if isinstance(op, Attend)] == [None, 20]


def test_tied_head_is_the_embedding():
    tied, untied = (emit_decoder(spec_of(TinyModel(tie_embeddings=is_tied))) for is_tied in (True, False))

    assert tied.ops[-1].weights == ("embed",)
    assert untied.ops[-1].weights == ("lm_head",)
