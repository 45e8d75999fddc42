"""A GGUF file as a `ModelShape`: of models that Octavo does not run, too, as far as their metadata says enough.

The metadata of a file is put into the words of a `config.json`, and counted as one. That this was done rightly is
checked by the file itself: its tensors have to hold as many numbers as were counted. Sizes in bytes are the file's own.

Source: the metadata keys of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.gguf_file import GgufHeader
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf

Config = dict[str, Any]
_SAME_COUNT = 0.01
"""Rotary tables and scales are in files and in no count; a wrong width would be off by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What a family's own fields are read from: metadata without the architecture's prefix, and the tensors' shapes."""

    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]

    def has(self, name: str) -> bool:
        """Whether any layer has a tensor, as `attn_q.bias`."""
        return any(each.endswith(f".{name}") for each in self.shapes)

    def optional(self, name: str) -> int | None:
        return self.fields.whole(name) if name in self.fields else None

    @property
    def expert_width(self) -> int | None:
        """Inner width of an expert, by its tensors: `[experts, width, hidden]`."""
        found = next((shape for name, shape in self.shapes.items() if name.endswith("ffn_up_exps.weight")), None)
        return found[1] if found is not None and len(found) == 3 else None


def shape_from_gguf(header: GgufHeader, *, name: str) -> ModelShape:
    """Count the model of a GGUF file.

    Raises:
        UnsupportedModelError: an architecture that cannot be counted from its metadata, or a file that says otherwise.
        ModelFileError: a field is missing or has an impossible value.
    """
    where = str(header.path)
    architecture = Fields(header.metadata, where).text("general.architecture")
    if architecture not in _FAMILIES:
        raise UnsupportedModelError(
            f"{where}: general.architecture is {architecture!r}, whose sizes we do not know how to count",
            because=f"the known ones are {', '.join(_FAMILIES)}",
            hints=("give the model's config.json instead",),
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    source = _Source(
        fields=Fields(values, where, parent=prefix),
        shapes={key: entry.shape for key, entry in header.tensors.items()},
    )
    of_family = _FAMILIES[architecture](source)
    config = _common(source) | of_family
    shape = shape_from_hf({key: value for key, value in config.items() if value is not None}, where=where, name=name)
    _check_count(shape, header)
    return shape


def _check_count(shape: ModelShape, header: GgufHeader) -> None:
    held = sum(entry.num_values for name, entry in header.tensors.items() if _layer(name) < len(shape.layers))
    if not 1 - _SAME_COUNT < held / shape.num_parameters < 1 + _SAME_COUNT:
        raise UnsupportedModelError(
            f"{header.path}: its tensors hold {held:,} numbers, its metadata makes {shape.num_parameters:,}",
            because="a model that is counted wrongly would be planned wrongly",
            hints=("give the model's config.json instead",),
        )


def _layer(name: str) -> int:
    """Return the layer of a tensor, -1 for one of none; a draft model's layers stand behind the model's own."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() else -1


def _common(source: _Source) -> Config:
    fields = source.fields
    embedding = source.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelFileError(f"{fields.where}: tensor 'token_embd.weight' is missing")
    num_heads = _alike(fields, "attention.head_count")
    return {
        "num_hidden_layers": fields.whole("block_count") - fields.whole("nextn_predict_layers", 0, minimum=0),
        "hidden_size": fields.whole("embedding_length"),
        "intermediate_size": _alike(fields, "feed_forward_length", source.expert_width),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _alike(fields, "attention.head_count_kv", num_heads),
        "head_dim": source.optional("attention.key_length"),
        "vocab_size": embedding[0],
        "max_position_embeddings": fields.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in source.shapes,
        "attention_bias": source.has("attn_q.bias") or source.has("attn_qkv.bias"),
        "mlp_bias": source.has("ffn_up.bias"),
        "num_experts": source.optional("expert_count") or None,
        "num_experts_per_tok": source.optional("expert_used_count") or None,
        "moe_intermediate_size": source.expert_width,
        "torch_dtype": "float16",
    }


def _alike(fields: Fields, name: str, default: int | None = None) -> int:
    """Read a size that some files list per layer; layers of different sizes are refused."""
    value = fields.raw(name)
    if not hasattr(value, "__len__") or isinstance(value, str):
        return fields.whole(name, default)
    listed = list(value)  # type: ignore[call-overload]  # arrays and lists are all that metadata has with a length
    if not listed or any(size != listed[0] for size in listed):
        raise UnsupportedModelError(
            f"{fields.describe(name)}; layers of different sizes cannot be counted",
            hints=("give the model's config.json instead",),
        )
    return Fields({name: listed[0]}, fields.where).whole(name)


def _plain(architecture: str, **own: Any) -> Callable[[_Source], Config]:
    """Count a family that has no fields of its own."""
    return lambda _source: {"architectures": [architecture], **own}


def _windowed(architecture: str) -> Callable[[_Source], Config]:
    """Count a family whose layers see a window by a pattern, which few files say."""

    def config(source: _Source) -> Config:
        own: Config = {}
        pattern = source.fields.raw("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            own["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]
        elif pattern is not None:
            own["sliding_window_pattern"] = source.fields.whole("attention.sliding_window_pattern")
        window = source.fields.whole("attention.sliding_window")
        return {"architectures": [architecture], "sliding_window": window, **own}

    return config


def _llama(source: _Source) -> Config:
    if source.optional("expert_count"):
        return {"architectures": ["MixtralForCausalLM"], "num_local_experts": source.fields.whole("expert_count")}
    window = source.fields.whole("attention.sliding_window", 0, minimum=0)
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else _LLAMA


def _olmo2(source: _Source) -> Config:
    # Files of OLMo 3 call themselves so, too, and have windows.
    return _windowed("Olmo3ForCausalLM")(source) if "attention.sliding_window" in source.fields else _OLMO2


def _phi3(source: _Source) -> Config:
    window = source.fields.whole("attention.sliding_window", 0, minimum=0)
    return {"architectures": ["Phi3ForCausalLM"], **({"sliding_window": window} if window else {})}


def _qwen2_moe(source: _Source) -> Config:
    shared = next((shape for name, shape in source.shapes.items() if name.endswith("ffn_up_shexp.weight")), (0, 0))
    return {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": shared[0]}


def _cohere(source: _Source) -> Config:
    return {"architectures": ["CohereForCausalLM"], "use_qk_norm": source.has("attn_q_norm.weight")}


def _gpt_oss(source: _Source) -> Config:
    return {
        **_windowed("GptOssForCausalLM")(source),
        "num_local_experts": source.fields.whole("expert_count"),
        "intermediate_size": source.expert_width,
    }


def _dense_first(architecture: str, **own: Any) -> Callable[[_Source], Config]:
    """Count a family with dense layers first, then experts with shared ones."""

    def config(source: _Source) -> Config:
        return {
            "architectures": [architecture],
            "n_routed_experts": source.fields.whole("expert_count"),
            "n_shared_experts": source.fields.whole("expert_shared_count", 0, minimum=0),
            "first_k_dense_replace": source.fields.whole("leading_dense_block_count", 0, minimum=0),
            "use_qk_norm": source.has("attn_q_norm.weight"),
            **own,
        }

    return config


def _deepseek2(source: _Source) -> Config:
    fields = source.fields
    rope = fields.whole("rope.dimension_count")
    # Files made for absorbed projections say the widths of a head under names of their own.
    key = fields.whole("attention.key_length_mla", fields.whole("attention.key_length"))
    value = fields.whole("attention.value_length_mla", fields.whole("attention.value_length"))
    if key <= rope:
        raise fields.error("attention.key_length", f"is {key}, of which {rope} carry the position")
    name = "DeepseekV3ForCausalLM" if source.has("exp_probs_b.bias") else "DeepseekV2ForCausalLM"
    return {
        **_dense_first(name)(source),
        "num_key_value_heads": None,
        "kv_lora_rank": fields.whole("attention.kv_lora_rank"),
        "q_lora_rank": source.optional("attention.q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
    }


_LLAMA: Config = {"architectures": ["LlamaForCausalLM"]}
_OLMO2: Config = {"architectures": ["Olmo2ForCausalLM"]}
_FAMILIES: dict[str, Callable[[_Source], Config]] = {
    "arcee": _plain("ArceeForCausalLM"),
    "cohere2": _windowed("Cohere2ForCausalLM"),
    "command-r": _cohere,
    "deepseek2": _deepseek2,
    "dots1": _dense_first("Dots1ForCausalLM", sliding_window=None),
    "gemma": _plain("GemmaForCausalLM"),
    "gemma2": _windowed("Gemma2ForCausalLM"),
    "gemma3": _windowed("Gemma3ForCausalLM"),
    "glm4": _plain("Glm4ForCausalLM"),
    "glm4moe": _dense_first("Glm4MoeForCausalLM"),
    "gpt-oss": _gpt_oss,
    "gptneox": _plain("GPTNeoXForCausalLM"),
    "granite": _plain("GraniteForCausalLM"),
    "granitemoe": lambda source: {
        "architectures": ["GraniteMoeForCausalLM"],
        "intermediate_size": source.expert_width,
    },
    "llama": _llama,
    "minimax-m2": lambda source: {"architectures": ["MiniMaxM2ForCausalLM"], "intermediate_size": source.expert_width},
    "nemotron": _plain("NemotronForCausalLM"),
    "olmo": _plain("OlmoForCausalLM"),
    "olmo2": _olmo2,
    "olmoe": lambda source: {"architectures": ["OlmoeForCausalLM"], "intermediate_size": source.expert_width},
    "phi2": _plain("PhiForCausalLM"),
    "phi3": _phi3,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen2moe": _qwen2_moe,
    "qwen2vl": _plain("Qwen2ForCausalLM"),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen3moe": _plain("Qwen3MoeForCausalLM"),
    "qwen3vl": _plain("Qwen3ForCausalLM"),
    "qwen3vlmoe": _plain("Qwen3MoeForCausalLM"),
    "seed_oss": _plain("SeedOssForCausalLM"),
    "smollm3": _plain("SmolLM3ForCausalLM"),
    "starcoder2": _plain("Starcoder2ForCausalLM"),
}
