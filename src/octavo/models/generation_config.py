"""What a model's makers suggest for sampling, from `generation_config.json` or GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Suggested sampling; `None` where nothing is suggested. Values are as the file has them, not yet checked for use.

    Args:
        do_sample: False means greedy.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_from_hf(config: Mapping[str, object], where: str) -> GenerationDefaults:
    """Read `generation_config.json`.

    Raises:
        ModelFileError: a field has the wrong type.
    """
    fields = Fields(config, where)
    return GenerationDefaults(
        do_sample=fields.flag("do_sample", default=False) if "do_sample" in fields else None,
        temperature=_number(fields, "temperature"),
        top_k=fields.whole("top_k", minimum=-1) if "top_k" in fields else None,
        top_p=_number(fields, "top_p"),
        min_p=_number(fields, "min_p"),
        repetition_penalty=_number(fields, "repetition_penalty"),
    )


def generation_from_gguf(metadata: Mapping[str, object], where: str) -> GenerationDefaults:
    """Read the `general.sampling` fields.

    Raises:
        ModelFileError: a field has the wrong type.
    """
    fields = Fields(metadata, where)
    return GenerationDefaults(
        temperature=_number(fields, "general.sampling.temp"),
        top_k=fields.whole("general.sampling.top_k", minimum=-1) if "general.sampling.top_k" in fields else None,
        top_p=_number(fields, "general.sampling.top_p"),
        min_p=_number(fields, "general.sampling.min_p"),
        repetition_penalty=_number(fields, "general.sampling.penalty_repeat"),
    )


def _number(fields: Fields, name: str) -> float | None:
    return fields.number(name) if name in fields else None
