"""KVFormat: how an engine stores one key or value head of one token, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.errors import InvalidParameterError
from octavo.models.kv_record import NUMBER_BITS, SCALE_BYTES, is_quantised
from octavo.models.shape import LayerKV
from octavo.units import cdiv, quote

Engine = Literal["octavo", "vllm", "sglang"]

_PACKED_LATENT_SCALE_GROUP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """Bits of an element, and what goes with a head.

    Args:
        scale_bytes: Of the scale of each token's key head, and of each value head. Octavo's quantised formats have one
            each, in 16 bits; other engines scale a whole tensor, which costs nothing per token.
        is_packed_latent: Latent layers of models with an indexer use the layout made for them: the part without
            position in 8 bits with a float32 scale per 128 elements, the rest in 16 bits.
    """

    name: str
    element_bits: int
    scale_bytes: int = 0
    is_packed_latent: bool = False

    def head_bytes(self, dim: int) -> int:
        """Return the bytes of one head of `dim` elements of one token; 0 if there is none."""
        return cdiv(dim * self.element_bits, 8) + self.scale_bytes if dim else 0

    def layer_bytes(self, kv: LayerKV, *, num_heads: int) -> int:
        """Return the bytes that one token leaves in one layer, of which `num_heads` heads are kept."""
        if self.is_packed_latent and kv.kind == "latent" and kv.index_bytes:
            plain = kv.key_dim - kv.rope_dim
            return plain + 4 * cdiv(plain, _PACKED_LATENT_SCALE_GROUP) + 2 * kv.rope_dim + kv.index_bytes
        return num_heads * (self.head_bytes(kv.key_dim) + self.head_bytes(kv.value_dim)) + kv.index_bytes


_OCTAVO: dict[str, KVFormat] = {
    dtype: KVFormat(name=dtype, element_bits=bits, scale_bytes=SCALE_BYTES if is_quantised(dtype) else 0)
    for dtype, bits in NUMBER_BITS.items()
}
_OTHERS = {
    "f32": KVFormat(name="f32", element_bits=32),
    "f16": KVFormat(name="f16", element_bits=16),
    "bf16": KVFormat(name="bf16", element_bits=16),
    "fp8": KVFormat(name="fp8", element_bits=8, is_packed_latent=True),
}
_SPELLINGS = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
_FP8_SPELLINGS = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")


def kv_format(engine: Engine, name: str = "auto", *, model_dtype: str = "bfloat16") -> KVFormat:
    """Return how `engine` stores a KV dtype.

    Args:
        name: As that engine spells it, or as we do; `auto` is the model's own, which other engines never keep wider
            than 16 bits.

    Raises:
        InvalidParameterError: the engine has no such KV dtype.
    """
    known = _OCTAVO if engine == "octavo" else _OTHERS
    asked = _SPELLINGS.get(name, name)
    if asked == "auto":
        asked = _SPELLINGS.get(model_dtype, "bf16")
        asked = "bf16" if asked == "f32" and engine != "octavo" else asked
    if asked in _FP8_SPELLINGS:
        asked = "fp8_e4m3" if engine == "octavo" and asked in ("fp8", "fp8_e4m3") else asked
        asked = "fp8" if engine != "octavo" else asked
    if asked not in known:
        raise InvalidParameterError(
            f"{quote(name)} is not a KV dtype of {engine}",
            param="kv-cache-dtype",
            because=f"it stores keys and values as {', '.join(known)}",
            hints=(f"`--kv-cache-dtype {min(known, key=lambda each: known[each].element_bits)}`",),
        )
    return known[asked]
