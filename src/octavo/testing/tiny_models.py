"""Tiny random models, for tests that need a real model but no download.

A `TinyModel` says what to build; the same weights can be written as a Hugging Face folder (here) or as a GGUF file
(`tiny_gguf.py`). Weights have a standard deviation of 0.125, not the usual 0.02: with 0.02 a random model's answer
hardly depends on its prompt, and a test passes on a broken cache.

    model = TinyModel(num_heads=4, num_kv_heads=2, seed=1)
    folder = write_hf_model(model, tmp_path / "model")

Each tensor is drawn from its own generator, keyed by (seed, tensor name): the same name, shape and seed give the same
numbers whatever else the model has. torch is not needed.
"""

from __future__ import annotations

import json
import string
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
FloatKind = Literal["f32", "f16", "bf16"]
Tensors = dict[str, npt.NDArray[np.float32]]

LINEAR_ROPE: Mapping[str, Any] = {"rope_type": "linear", "factor": 4.0}
LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""With 16-wide heads and theta 10,000 some frequencies are kept, one is blended and some are divided."""
YARN_ROPE: Mapping[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_TOKENIZER_VOCAB = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SAFETENSORS_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What to build.

    Args:
        head_dim: Width of a head; 0 means `hidden_size // num_heads`.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: The Hugging Face field, e.g. `LLAMA3_ROPE`; empty means unscaled.
        sliding_window: For mistral: tokens a query sees.
        attention_bias: For llama and qwen3: biases on q, k, v and o (qwen2 always has them on q, k, v).
        mlp_bias: For llama: biases on gate, up and down.
        seed: Same seed, same weights.
        eos_token_id: Named in config and GGUF metadata; `None` names none.
    """

    architecture: Architecture = "llama"
    num_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 0
    vocab_size: int = 512
    max_position: int = 2048
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    weight_std: float = 0.125
    seed: int = 0
    eos_token_id: int | None = IM_END_ID

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2" or self.attention_bias


def tensor_shapes(model: TinyModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, by Hugging Face name, in file order."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q_width, kv_width = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, hidden)
            if model.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_width)
        if model.attention_bias and model.architecture != "qwen2":
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if model.architecture == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (model.head_width,)
            shapes[prefix + "self_attn.k_norm.weight"] = (model.head_width,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
            if model.mlp_bias:
                shapes[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def make_tensors(model: TinyModel) -> Tensors:
    """Draw every tensor: norm weights around 1, the others around 0."""
    tensors: Tensors = {}
    for name, shape in tensor_shapes(model).items():
        rng = np.random.default_rng([model.seed, zlib.crc32(name.encode())])
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(model.weight_std)
        tensors[name] = values + np.float32(1) if "norm" in name else values
    return tensors


def make_config(model: TinyModel, *, dtype: FloatKind = "f32", modern_rope: bool = False) -> dict[str, Any]:
    """Return `config.json`; `modern_rope` spells the rope as `rope_parameters`, as recent files do."""
    config: dict[str, Any] = {
        "architectures": [_HF_CLASSES[model.architecture]],
        "model_type": model.architecture,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": ENDOFTEXT_ID,
        "eos_token_id": model.eos_token_id,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }
    if modern_rope:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta, **model.rope_scaling}
    else:
        config["rope_theta"] = model.rope_theta
        config["rope_scaling"] = dict(model.rope_scaling) or None
    if model.architecture in ("llama", "qwen3"):
        config["attention_bias"] = model.attention_bias
    if model.architecture == "llama":
        config["mlp_bias"] = model.mlp_bias
    if model.architecture == "mistral":
        config["sliding_window"] = model.sliding_window
    return config


def write_hf_model(
    model: TinyModel,
    folder: Path,
    *,
    dtype: FloatKind = "f32",
    num_shards: int = 1,
    modern_rope: bool = False,
    tensors: Tensors | None = None,
) -> Path:
    """Write a Hugging Face folder and return it.

    Args:
        dtype: Type the weights are rounded to in the file.
        num_shards: More than 1 writes that many files and an index.
        tensors: Weights to write instead of `make_tensors(model)`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", make_config(model, dtype=dtype, modern_rope=modern_rope))
    _write_json(folder / "generation_config.json", {"eos_token_id": model.eos_token_id, "bos_token_id": ENDOFTEXT_ID})
    if model.vocab_size >= MIN_TOKENIZER_VOCAB:
        _write_json(folder / "tokenizer.json", make_tokenizer(model.vocab_size))
        _write_json(folder / "tokenizer_config.json", make_tokenizer_config())
    tensors = make_tensors(model) if tensors is None else tensors
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype=dtype)
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % num_shards == shard}
        write_safetensors(folder / file_name, part, dtype=dtype)
        weight_map.update(dict.fromkeys(part, file_name))
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]], *, dtype: FloatKind = "f32") -> None:
    """Write one safetensors file: 8 bytes of header length, a JSON header, then the tensors back to back."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        chunk = encode_float(tensor, dtype)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        chunks.append(chunk)
        offset += len(chunk)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def encode_float(tensor: npt.NDArray[np.float32], dtype: FloatKind) -> bytes:
    """Round to nearest even and return little-endian bytes."""
    if dtype == "f32":
        return tensor.astype("<f4").tobytes()
    if dtype == "f16":
        return tensor.astype("<f2").tobytes()
    bits = np.ascontiguousarray(tensor, dtype="<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def make_vocab(vocab_size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens by id and merges: special tokens, 256 bytes, pairs of lower-case letters, then unused fillers."""
    assert vocab_size >= MIN_TOKENIZER_VOCAB, f"a byte-level vocabulary has at least {MIN_TOKENIZER_VOCAB} tokens"
    tokens = [*SPECIAL_TOKENS, *_byte_characters()]
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    merges = pairs[: vocab_size - len(tokens)]
    tokens += [a + b for a, b in merges]
    tokens += [f"<|unused_{i}|>" for i in range(len(tokens), vocab_size)]
    return tokens, merges


def make_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return `tokenizer.json` of a byte-level BPE with GPT-2's splitting."""
    tokens, merges = make_vocab(vocab_size)
    special = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }


def make_tokenizer_config() -> dict[str, Any]:
    """Return `tokenizer_config.json` with a ChatML template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[ENDOFTEXT_ID],
        "eos_token": SPECIAL_TOKENS[IM_END_ID],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _byte_characters() -> list[str]:
    """Return the printable stand-in of each byte 0..255, as byte-level BPE vocabularies spell them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
