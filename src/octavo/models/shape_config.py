"""Reads a Hugging Face `config.json` as a `ModelShape`: any published model whose bytes we know how to count.

An architecture that is not in the table is refused, as is a kind of layer that its family does not have: a guess would
be off by a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.errors import UnsupportedModelError
from octavo.models.fields import Fields
from octavo.models.shape import ModelShape
from octavo.models.shapes import dense
from octavo.models.shapes.draft import ShapeDraft

_FAMILIES: dict[str, Callable[[Fields], ShapeDraft]] = {
    "LlamaForCausalLM": dense.draft_llama,
    "MistralForCausalLM": dense.draft_mistral,
    "Qwen2ForCausalLM": dense.draft_qwen2,
    "Qwen3ForCausalLM": dense.draft_qwen3,
}


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
    draft = _FAMILIES[architecture](fields)
    assert len(draft.layers) == draft.num_layers, "every layer was read"
    return ModelShape(
        name=name,
        architecture=architecture,
        dtype=_dtype(fields),
        quantization=_quantization(fields),
        hidden_size=draft.hidden_size,
        num_heads=draft.num_heads,
        vocab_size=draft.vocab_size,
        max_position=fields.whole("max_position_embeddings"),
        layers=tuple(draft.layers),
        tensors=draft.tensors,
        intermediate_size=draft.intermediate_size,
        is_tied=draft.is_tied,
    )


def known_architectures() -> tuple[str, ...]:
    """Return the names that `architectures` may have."""
    return tuple(sorted(_FAMILIES))


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "does not name exactly one architecture")
    if names[0] not in _FAMILIES:
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
            return fields.text(name)
    return "bfloat16" if "quantization_config" in fields else "float32"


def _quantization(fields: Fields) -> str:
    if "quantization_config" not in fields:
        return ""
    return fields.inner("quantization_config").text("quant_method")
