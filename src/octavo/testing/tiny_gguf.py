"""The models of `tiny_models.py` as GGUF files, laid out as llama.cpp's converter lays them out.

That includes its traps: q and k rows of Llama-family files (llama and mistral) are permuted for interleaved rotary
pairs, `llama3` rope scaling becomes a tensor of divisors, a tied head has no tensor of its own. One-dimensional
tensors are always F32. A tensor whose rows do not divide into the wanted type's blocks falls back to Q8_0, then F32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from octavo.testing.tiny_models import (
    CHAT_TEMPLATE,
    ENDOFTEXT_ID,
    IM_END_ID,
    MIN_TOKENIZER_VOCAB,
    SPECIAL_TOKENS,
    Tensors,
    TinyModel,
    make_tensors,
    make_vocab,
)

GgufKind = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q6_k"]
Bytes = npt.NDArray[np.uint8]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf_model(
    model: TinyModel,
    path: Path,
    *,
    kind: GgufKind = "f32",
    embed_kind: GgufKind | None = None,
    tensors: Tensors | None = None,
) -> Path:
    """Write a GGUF file and return its path.

    Args:
        kind: Type of the matrices.
        embed_kind: Type of the embedding and head when it differs.
        tensors: Weights by Hugging Face name instead of `make_tensors(model)`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, gguf_architecture(model))
    _add_sizes(writer, model)
    _add_rope(writer, model)
    if model.vocab_size >= MIN_TOKENIZER_VOCAB:
        _add_tokenizer(writer, model)
    for name, tensor in (make_tensors(model) if tensors is None else tensors).items():
        is_outer = name in ("model.embed_tokens.weight", "lm_head.weight")
        used = pick_kind(tensor, embed_kind if is_outer and embed_kind else kind)
        rows = permute_for_gguf(model, name, tensor)
        writer.add_tensor(gguf_name(name), encode(rows, used), raw_dtype=gguf.GGMLQuantizationType[used.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_architecture(model: TinyModel) -> str:
    """Return `general.architecture`; Mistral models are files of the Llama family."""
    return "llama" if model.architecture == "mistral" else model.architecture


def gguf_name(hf_name: str) -> str:
    """Translate a Hugging Face tensor name."""
    stem, suffix = hf_name.rsplit(".", 1)
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    layer, inner = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.{suffix}"


def permute_for_gguf(model: TinyModel, hf_name: str, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Reorder q and k rows of Llama-family files: rotary pairs (i, i + head_dim / 2) become neighbours."""
    if gguf_architecture(model) != "llama" or not ("q_proj" in hf_name or "k_proj" in hf_name):
        return tensor
    num_heads = model.num_heads if "q_proj" in hf_name else model.num_kv_heads
    halves = tensor.reshape(num_heads, 2, model.head_width // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def pick_kind(tensor: npt.NDArray[np.float32], kind: GgufKind) -> GgufKind:
    """Return the type a tensor is stored in: `kind` where its rows divide into whole blocks."""
    if tensor.ndim == 1:
        return "f32"
    fits = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][0] == 0
    if fits:
        return kind
    return "q8_0" if tensor.shape[-1] % 32 == 0 else "f32"


def encode(tensor: npt.NDArray[np.float32], kind: GgufKind) -> npt.NDArray[Any]:
    """Quantise to the bytes (or floats) that `GGUFWriter.add_tensor` takes."""
    if kind == "f32":
        return tensor.astype(np.float32)
    if kind == "f16":
        return tensor.astype(np.float16)
    own: dict[str, Callable[[npt.NDArray[np.float32]], Bytes]] = {"q4_k": _quantize_q4_k, "q6_k": _quantize_q6_k}
    if kind in own:
        rows = own[kind](tensor.reshape(-1, 256))
        return rows.reshape(*tensor.shape[:-1], -1)
    encoded: npt.NDArray[Any] = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType[kind.upper()])
    return encoded


def round_through(model: TinyModel, kind: GgufKind, *, embed_kind: GgufKind | None = None) -> Tensors:
    """Return the float32 weights a GGUF file of this kind stands for, by Hugging Face name, in Hugging Face row order.

    Written with `write_hf_model(..., tensors=...)` they make the float model that the quantised file must agree with.
    """
    rounded: Tensors = {}
    for name, tensor in make_tensors(model).items():
        is_outer = name in ("model.embed_tokens.weight", "lm_head.weight")
        used = pick_kind(tensor, embed_kind if is_outer and embed_kind else kind)
        if used != "f32":
            encoded = encode(tensor, used)
            tensor = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[used.upper()]).reshape(tensor.shape)
        rounded[name] = tensor.astype(np.float32)
    return rounded


def _add_sizes(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_name(f"tiny {model.architecture}")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_key_length(model.head_width)
    writer.add_value_length(model.head_width)
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)


def _add_rope(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_rope_dimension_count(model.head_width)
    scaling = model.rope_scaling
    match scaling.get("rope_type", "default"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3_divisors(model))
        case kind:
            assert kind == "default", kind


def _llama3_divisors(model: TinyModel) -> npt.NDArray[np.float32]:
    scaling = model.rope_scaling
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for i in range(0, model.head_width, 2):
        turns = original / (2 * math.pi * model.rope_theta ** (i / model.head_width))
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - kept) / factor + kept))
    return np.array(divisors, dtype=np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    tokens, merges = make_vocab(model.vocab_size)
    types = [gguf.TokenType.NORMAL] * len(tokens)
    types[: len(SPECIAL_TOKENS)] = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(ENDOFTEXT_ID)
    if model.eos_token_id is not None:
        writer.add_eos_token_id(model.eos_token_id)
    writer.add_pad_token_id(IM_END_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _quantize_q4_k(blocks: npt.NDArray[np.float32]) -> Bytes:
    """Quantise `[n, 256]` to Q4_K, `[n, 144]`: plain minimum and maximum of each 32, no search for better scales."""
    n = blocks.shape[0]
    parts = blocks.reshape(n, 8, 32)
    minimum = np.maximum(-parts.min(axis=-1), 0)
    step = (parts.max(axis=-1) + minimum) / 15
    d = (step.max(axis=-1, keepdims=True) / 63).astype(np.float16)
    dmin = (minimum.max(axis=-1, keepdims=True) / 63).astype(np.float16)
    scale6 = _divide(step, d).round().clip(0, 63).astype(np.uint8)
    min6 = _divide(minimum, dmin).round().clip(0, 63).astype(np.uint8)
    real_step = d.astype(np.float32) * scale6
    real_min = dmin.astype(np.float32) * min6
    codes = _divide(parts + real_min[..., None], real_step[..., None]).round().clip(0, 15).astype(np.uint8)
    low = (scale6[:, :4] & 63) | ((scale6[:, 4:] >> 4) << 6)
    mid = (min6[:, :4] & 63) | ((min6[:, 4:] >> 4) << 6)
    high = (scale6[:, 4:] & 15) | ((min6[:, 4:] & 15) << 4)
    pairs = codes.reshape(n, 4, 2, 32)
    packed = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(n, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), low, mid, high, packed], axis=-1)


def _quantize_q6_k(blocks: npt.NDArray[np.float32]) -> Bytes:
    """Quantise `[n, 256]` to Q6_K, `[n, 210]`: symmetric steps for each 16."""
    n = blocks.shape[0]
    parts = blocks.reshape(n, 16, 16)
    step = np.abs(parts).max(axis=-1) / 31
    d = (step.max(axis=-1, keepdims=True) / 127).astype(np.float16)
    scale8 = _divide(step, d).round().clip(-128, 127).astype(np.int8)
    real_step = d.astype(np.float32) * scale8
    codes = (_divide(parts, real_step[..., None]).round().clip(-32, 31) + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    low = np.stack([codes[:, :, 0] & 15 | (codes[:, :, 2] & 15) << 4, codes[:, :, 1] & 15 | (codes[:, :, 3] & 15) << 4])
    high = sum((codes[:, :, i] >> 4) << (2 * i) for i in range(4))
    assert isinstance(high, np.ndarray)
    ql = low.transpose(1, 2, 0, 3).reshape(n, 128)
    return np.concatenate([ql, high.reshape(n, 64).astype(np.uint8), scale8.view(np.uint8), d.view(np.uint8)], axis=-1)


def _divide(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Divide with 0 / 0 = 0: an all-zero block has scale 0."""
    denominator = denominator.astype(np.float32)
    safe = np.where(denominator == 0, np.float32(1), denominator)
    return np.where(denominator == 0, np.float32(0), numerator / safe).astype(np.float32)
