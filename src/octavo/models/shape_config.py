"""Reads a Hugging Face `config.json` as a `ModelShape`: any published model whose bytes we know how to count.

An architecture that is not in the table is refused, as is a kind of layer that its family does not have: a guess would
be off by a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.packing import packing_from_hf
from octavo.models.shape import ModelShape
from octavo.models.shapes import classic, deepseek_v4, dense, gemma4, hybrid, latent, mixture, multimodal, ungated
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.multimodal import of_text, text_of

_FAMILIES: dict[str, Callable[[Fields], ShapeDraft]] = {
    "ArceeForCausalLM": ungated.draft_arcee,
    "BloomForCausalLM": classic.draft_bloom,
    "Cohere2ForCausalLM": dense.draft_cohere2,
    "CohereForCausalLM": dense.draft_cohere,
    "DeepseekV2ForCausalLM": latent.draft_deepseek,
    "DeepseekV32ForCausalLM": latent.draft_deepseek_sparse,
    "DeepseekV3ForCausalLM": latent.draft_deepseek,
    "DeepseekV4ForCausalLM": deepseek_v4.draft_deepseek_v4,
    "Dots1ForCausalLM": mixture.draft_dots1,
    "Exaone4ForCausalLM": dense.draft_exaone4,
    "FalconForCausalLM": classic.draft_falcon,
    "GPT2LMHeadModel": classic.draft_gpt2,
    "GPTBigCodeForCausalLM": classic.draft_gpt_bigcode,
    "GPTJForCausalLM": classic.draft_gptj,
    "GPTNeoXForCausalLM": classic.draft_gpt_neox,
    "Gemma2ForCausalLM": dense.draft_gemma2,
    "Gemma3ForCausalLM": dense.draft_gemma3,
    "Gemma4ForCausalLM": gemma4.draft_gemma4,
    "GemmaForCausalLM": dense.draft_gemma,
    "Glm4ForCausalLM": dense.draft_glm4,
    "Glm4MoeForCausalLM": mixture.draft_glm4_moe,
    "Glm4MoeLiteForCausalLM": latent.draft_deepseek,
    "GlmForCausalLM": dense.draft_glm,
    "GlmMoeDsaForCausalLM": latent.draft_deepseek_sparse,
    "GptOssForCausalLM": mixture.draft_gpt_oss,
    "GraniteForCausalLM": dense.draft_granite,
    "GraniteMoeForCausalLM": mixture.draft_granite_moe,
    "GraniteMoeHybridForCausalLM": hybrid.draft_granite_hybrid,
    "JambaForCausalLM": hybrid.draft_jamba,
    "KimiLinearForCausalLM": hybrid.draft_kimi_linear,
    "Llama4ForCausalLM": mixture.draft_llama4,
    "LlamaForCausalLM": dense.draft_llama,
    "MiMoV2FlashForCausalLM": mixture.draft_mimo_v2,
    "MiniCPM3ForCausalLM": latent.draft_minicpm3,
    "MiniMaxM2ForCausalLM": mixture.draft_minimax_m2,
    "Ministral3ForCausalLM": dense.draft_ministral3,
    "MinistralForCausalLM": dense.draft_ministral,
    "Mistral4ForCausalLM": latent.draft_mistral4,
    "MistralForCausalLM": dense.draft_mistral,
    "MixtralForCausalLM": mixture.draft_mixtral,
    "NemotronForCausalLM": ungated.draft_nemotron,
    "NemotronHForCausalLM": hybrid.draft_nemotron_h,
    "OPTForCausalLM": classic.draft_opt,
    "Olmo2ForCausalLM": dense.draft_olmo2,
    "Olmo3ForCausalLM": dense.draft_olmo3,
    "OlmoForCausalLM": dense.draft_olmo,
    "OlmoeForCausalLM": mixture.draft_olmoe,
    "Phi3ForCausalLM": dense.draft_phi3,
    "PhiForCausalLM": classic.draft_phi,
    "Qwen2ForCausalLM": dense.draft_qwen2,
    "Qwen2MoeForCausalLM": mixture.draft_qwen2_moe,
    "Qwen3ForCausalLM": dense.draft_qwen3,
    "Qwen3MoeForCausalLM": mixture.draft_qwen3_moe,
    "Qwen3NextForCausalLM": hybrid.draft_qwen3_next,
    "Qwen3_5ForCausalLM": hybrid.draft_qwen3_next,
    "Qwen3_5MoeForCausalLM": hybrid.draft_qwen3_next,
    "SeedOssForCausalLM": dense.draft_seed_oss,
    "SmolLM3ForCausalLM": dense.draft_smollm3,
    "Starcoder2ForCausalLM": ungated.draft_starcoder2,
}
_MULTIMODAL_FAMILIES: dict[str, Callable[[Fields], ShapeDraft]] = {
    "Gemma3ForConditionalGeneration": of_text(dense.draft_gemma3),
    "Gemma4ForConditionalGeneration": of_text(gemma4.draft_gemma4),
    "Idefics3ForConditionalGeneration": multimodal.draft_by_text_type,
    "KimiK25ForConditionalGeneration": multimodal.draft_by_text_type,
    "Llama4ForConditionalGeneration": of_text(mixture.draft_llama4),
    "LlavaForConditionalGeneration": multimodal.draft_by_text_type,
    "LlavaNextForConditionalGeneration": multimodal.draft_by_text_type,
    "Mistral3ForConditionalGeneration": multimodal.draft_by_text_type,
    "MllamaForConditionalGeneration": multimodal.draft_mllama,
    "Phi3VForCausalLM": of_text(dense.draft_phi3),
    "Qwen2VLForConditionalGeneration": of_text(dense.draft_qwen2),
    "Qwen2_5_VLForConditionalGeneration": of_text(dense.draft_qwen2),
    "Qwen3VLForConditionalGeneration": of_text(dense.draft_qwen3),
    "Qwen3VLMoeForConditionalGeneration": of_text(mixture.draft_qwen3_moe),
    "Qwen3_5ForConditionalGeneration": of_text(hybrid.draft_qwen3_next),
    "Qwen3_5MoeForConditionalGeneration": of_text(hybrid.draft_qwen3_next),
    "SmolVLMForConditionalGeneration": multimodal.draft_by_text_type,
}
_DTYPES = ("float32", "float", "float16", "half", "bfloat16")
_ALL_FAMILIES = _FAMILIES | _MULTIMODAL_FAMILIES


def shape_from_hf(config: Mapping[str, object], *, where: str, name: str) -> ModelShape:
    """Read a configuration.

    Args:
        config: The parsed file.
        where: Start of the error messages: the file.
        name: Name of the model, for people.

    Raises:
        UnsupportedModelError: an architecture or a kind of layer whose bytes we do not know how to count.
        ModelFileError: a field is missing or has an impossible value.
    """
    fields = Fields(config, where)
    architecture = _architecture(fields)
    draft = _ALL_FAMILIES[architecture](fields)
    is_multimodal = architecture in _MULTIMODAL_FAMILIES
    assert len(draft.layers) == draft.num_layers, "every layer was read"
    return ModelShape(
        name=name,
        architecture=architecture,
        dtype=_dtype(text_of(fields) if is_multimodal else fields),
        quantization=_quantization(fields),
        packing=packing_from_hf(fields),
        hidden_size=draft.hidden_size,
        num_heads=draft.num_heads,
        vocab_size=draft.vocab_size,
        max_position=draft.max_position,
        layers=tuple(draft.layers),
        tensors=draft.tensors,
        intermediate_size=draft.intermediate_size,
        is_tied=draft.is_tied,
        uncounted=("vision tower",) if is_multimodal else (),
    )


def known_architectures() -> tuple[str, ...]:
    """Return the names that `architectures` may have."""
    return tuple(sorted(_ALL_FAMILIES))


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "does not name exactly one architecture")
    if names[0] not in _ALL_FAMILIES:
        raise UnsupportedModelError(
            f"{fields.where}: architectures names {names[0]}, whose sizes we do not know how to count",
            because=f"the known ones are {', '.join(known_architectures())}",
        )
    return names[0]


def _dtype(fields: Fields) -> str:
    """Return how unquantised weights are stored; files name it `dtype` since 2025, `torch_dtype` before.

    A file without either is one of float32, as old ones are, or a quantised one, whose other tensors are bfloat16.
    """
    for name in ("dtype", "torch_dtype"):
        if name in fields:
            dtype = fields.text(name)
            if dtype not in _DTYPES:
                raise UnsupportedModelError(
                    f"{fields.describe(name)}, of which we do not know how it is stored",
                    because=f"the known ones are {', '.join(_DTYPES)}",
                )
            return dtype
    return "bfloat16" if "quantization_config" in fields else "float32"


def _quantization(fields: Fields) -> str:
    if "quantization_config" not in fields:
        return ""
    return fields.inner("quantization_config").text("quant_method")
