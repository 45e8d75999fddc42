"""Models that see images: their text part, whose family a field names, and the parts beside it."""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shapes import dense, latent, mixture
from octavo.models.shapes.decoder import PRE_NORMS, head_dim_of, num_kv_heads_of
from octavo.models.shapes.draft import ShapeDraft
from octavo.models.shapes.parts import Attention, add_attention, add_gated_mlp

DraftFamily = Callable[[Fields], ShapeDraft]

_TEXT_FAMILIES: dict[str, DraftFamily] = {
    "llama": dense.draft_llama,
    "mistral": dense.draft_mistral,
    "ministral3": dense.draft_ministral3,
    "qwen2": dense.draft_qwen2,
    "qwen3": dense.draft_qwen3,
    "granite": dense.draft_granite,
    "gemma": dense.draft_gemma,
    "gemma2": dense.draft_gemma2,
    "deepseek_v3": latent.draft_deepseek,
    "kimi_k2": latent.draft_deepseek,
    "mistral4": latent.draft_mistral4,
    "qwen3_moe": mixture.draft_qwen3_moe,
}


def text_of(fields: Fields) -> Fields:
    """Return the fields of the text part, with what the outer object says for the whole."""
    text = fields.inner("text_config") if "text_config" in fields else fields
    outer = {
        name: fields.raw(name)
        for name in ("tie_word_embeddings", "dtype", "torch_dtype", "vocab_size")
        if name in fields
    }
    return text.with_defaults(outer)


def draft_by_text_type(fields: Fields) -> ShapeDraft:
    """Count the text part of a model whose outer architecture holds any of several (LLaVA, Mistral 3, SmolVLM)."""
    text = text_of(fields)
    kind = text.text("model_type")
    if kind not in _TEXT_FAMILIES:
        raise UnsupportedModelError(
            f"{text.describe('model_type')}, whose sizes we do not know how to count",
            because=f"the known text parts are {', '.join(sorted(_TEXT_FAMILIES))}",
        )
    return _TEXT_FAMILIES[kind](text)


def of_text(draft_family: DraftFamily) -> DraftFamily:
    """Make a family that counts the text part of files whose outer architecture has one text family."""
    return lambda fields: draft_family(text_of(fields))


def draft_mllama(fields: Fields) -> ShapeDraft:
    """Llama 3.2 Vision: a Llama with further layers that attend to the image.

    Those layers keep keys and values of the image's tokens; engines hold them in blocks of the same pool.
    """
    text = text_of(fields)
    draft = ShapeDraft(text)
    cross = text.raw("cross_attention_layers")
    if not isinstance(cross, list) or not all(type(layer) is int for layer in cross):
        raise text.error("cross_attention_layers", "is not a list of layers")
    head_dim = head_dim_of(draft)
    attention = Attention(num_heads=draft.num_heads, num_kv_heads=num_kv_heads_of(draft), head_dim=head_dim)
    draft.add("embed_tokens.weight", "embedding", draft.vocab_size + 8, draft.hidden_size, num_shards=draft.vocab_size)
    for layer in range(draft.num_layers):
        draft.layers.append(add_attention(draft, layer, attention))
        add_gated_mlp(draft, layer, text.whole("intermediate_size"))
        for name in PRE_NORMS:
            draft.norm(f"layers.*.{name}", draft.hidden_size, layer=layer)
        if layer in cross:
            for name in ("q_norm", "k_norm"):
                draft.norm(f"layers.*.cross_attn.{name}", head_dim, layer=layer)
            for name in ("attn_gate", "mlp_gate"):
                draft.add(f"layers.*.cross_attn_{name}", "other", 1, 1, layer=layer)
    draft.norm("norm", draft.hidden_size)
    draft.head(is_tied=text.flag("tie_word_embeddings", default=False))
    return draft
