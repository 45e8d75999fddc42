"""Reads the metadata of a GGUF file as a `ModelSpec`.

GGUF has no flags for biases, norms on q and k, or a tied head: the tensors that the file holds say so. Mistral models
are files of the `llama` architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.fields import Fields, shortest_float32
from octavo.models.gguf_families import GGUF_FAMILIES, GgufFamily
from octavo.models.gguf_file import GgufHeader
from octavo.models.header_reader import open_model_file, read_into
from octavo.models.names import gguf_name
from octavo.models.rope_config import rope_from_gguf
from octavo.models.spec import ModelSpec
from octavo.models.spec_checks import check_num_layers, complete_spec, derive_head_dim
from octavo.models.tensor_entry import TensorEntry

ROPE_FREQS = "rope_freqs.weight"

# Fields that change the arithmetic, with the value that means "off".
_NEUTRAL: dict[str, float] = {
    "expert_count": 0,
    "attention.max_alibi_bias": 0,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
}


def spec_from_gguf(header: GgufHeader) -> ModelSpec:
    """Read a configuration.

    Raises:
        UnsupportedModelError: an architecture, rotary scaling or field we do not run.
        ModelFileError: a field is missing or has an impossible value.
    """
    where = str(header.path)
    general = Fields(header.metadata, where)
    architecture = general.text("general.architecture")
    if architecture not in GGUF_FAMILIES:
        raise UnsupportedModelError(
            f"{general.describe('general.architecture')}, which is not implemented",
            because=f"the known ones are {', '.join(GGUF_FAMILIES)}",
        )
    family = GGUF_FAMILIES[architecture]
    fields = _of_architecture(header, architecture)
    _refuse_other_arithmetic(fields, family)
    num_layers = check_num_layers(fields.whole("block_count"), where=where)
    hidden_size = fields.whole("embedding_length")
    num_heads = _same_for_all_layers(fields, "attention.head_count", num_layers)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_position = fields.whole("context_length")
    vocab_size = _vocab_size(header, fields)
    eos = [*general.token_ids("tokenizer.ggml.eos_token_id", vocab_size)]
    eos += general.token_ids("tokenizer.ggml.eot_token_id", vocab_size)
    eos += general.token_ids("tokenizer.ggml.eom_token_id", vocab_size)
    spec = ModelSpec(
        name=general.text("general.name", header.path.stem),
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_same_for_all_layers(fields, "feed_forward_length", num_layers),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_same_for_all_layers(fields, "attention.head_count_kv", num_layers, default=num_heads),
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=fields.positive(family.eps_field),
        rope=rope_from_gguf(
            fields,
            head_dim=head_dim,
            max_position=max_position,
            freq_factors=_read_freq_factors(header.tensors, head_dim),
        ),
        tie_embeddings=gguf_name("lm_head") not in header.tensors,
        bos_token_id=next(iter(general.token_ids("tokenizer.ggml.bos_token_id", vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )
    spec = replace(spec, **family.parts(fields, spec, header.tensors))
    _check_family(spec, header.path)
    return complete_spec(spec, windows=family.windows(fields, num_layers), where=where)


def _of_architecture(header: GgufHeader, architecture: str) -> Fields:
    """Return the fields named `llama.*`, without that prefix, floats as their shortest spelling."""
    prefix = architecture + "."
    values = {
        name.removeprefix(prefix): shortest_float32(value) if isinstance(value, float) else value
        for name, value in header.metadata.items()
        if name.startswith(prefix)
    }
    return Fields(values, str(header.path), parent=prefix)


def _refuse_other_arithmetic(fields: Fields, family: GgufFamily) -> None:
    for name, neutral in _NEUTRAL.items():
        if name not in family.reads and fields.number(name, neutral) != neutral:
            raise UnsupportedModelError(f"{fields.describe(name)}, which is not implemented")
    if not fields.flag("attention.causal", default=True):
        raise UnsupportedModelError(f"{fields.describe('attention.causal')}; only causal attention is implemented")


def _same_for_all_layers(fields: Fields, name: str, num_layers: int, *, default: int | None = None) -> int:
    """Read a size that some files list per layer; layers of different sizes are refused."""
    value = fields.raw(name)
    if not hasattr(value, "__len__") or isinstance(value, str):
        return fields.whole(name, default)
    listed = list(value) if isinstance(value, Iterable) else []
    if len(listed) != num_layers:
        raise fields.error(name, f"lists {len(listed)} sizes, one for each of {num_layers} layers was expected")
    if any(size != listed[0] for size in listed):
        raise UnsupportedModelError(f"{fields.describe(name)}; layers of different sizes are not implemented")
    return Fields({name: listed[0]}, fields.where).whole(name)


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if "attention.key_length" not in fields:
        return derive_head_dim(hidden_size, num_heads, where=fields.where)
    head_dim = fields.whole("attention.key_length")
    if fields.whole("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{fields.describe('attention.value_length')}, but keys have {head_dim}; only equal widths are implemented"
        )
    return head_dim


def _vocab_size(header: GgufHeader, fields: Fields) -> int:
    """Take the size from its own field, else from the list of tokens, else from the embedding's rows."""
    if "vocab_size" in fields:
        return fields.whole("vocab_size")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    embed = header.tensors.get(gguf_name("embed"))
    if embed is None or len(embed.shape) != 2 or embed.shape[0] < 1:
        raise fields.error("vocab_size", "is missing")
    return embed.shape[0]


def _check_family(spec: ModelSpec, path: Path) -> None:
    """Qwen2 always has biases on q, k, v; some families always have norms on q and k, and the others never."""
    if spec.architecture == "qwen2" and not spec.qkv_bias:
        raise ModelFileError(f"{path}: tensor {gguf_name('layers.0.q_bias')!r} is missing")
    has_qk_norm = spec.architecture in ("qwen3", "qwen3_moe", "olmo2", "gemma3")
    if has_qk_norm and not spec.qk_norm:
        raise ModelFileError(f"{path}: tensor {gguf_name('layers.0.q_norm')!r} is missing")
    if not has_qk_norm and spec.qk_norm:
        raise UnsupportedModelError(
            f"{path}: tensor {gguf_name('layers.0.q_norm')!r} is not part of a {spec.architecture} model"
        )


def _read_freq_factors(tensors: Mapping[str, TensorEntry], head_dim: int) -> tuple[float, ...]:
    """Read `rope_freqs.weight`, divisors of the rotary frequencies (how these files spell Llama 3's scaling)."""
    entry = tensors.get(ROPE_FREQS)
    if entry is None:
        return ()
    if entry.kind != "f32" or entry.shape != (head_dim // 2,):
        raise ModelFileError(
            f"{entry.path}: tensor {ROPE_FREQS!r} is {entry.kind} {list(entry.shape)}, "
            f"f32 [{head_dim // 2}] was expected"
        )
    data = bytearray(entry.num_bytes)
    with open_model_file(entry.path) as file:
        if read_into(file, entry.offset_bytes, memoryview(data)) != entry.num_bytes:
            raise ModelFileError(f"{entry.path}: tensor {ROPE_FREQS!r} is cut off")
    factors = struct.unpack(f"<{head_dim // 2}f", data)
    if not all(0 < factor < float("inf") for factor in factors):
        raise ModelFileError(f"{entry.path}: tensor {ROPE_FREQS!r} holds a divisor that is not a number above 0")
    return factors
