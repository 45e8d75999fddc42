"""Chat templates of a Hugging Face folder: files of their own, or a field of `tokenizer_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError
from octavo.models.json_file import read_json, read_model_text
from octavo.runtime.tokenizer import ChatTemplateSource

_FIELD = "chat_template"


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, ChatTemplateSource]:
    """Return the chat templates by name. Files count before the field, as they do for transformers.

    Args:
        config: Content of `tokenizer_config.json`.

    Raises:
        ModelFileError: a template is not text.
    """
    files = _template_files(folder)
    if files:
        return {name: _read_template(path) for name, path in files.items()}
    old_file = folder / "chat_template.json"
    if old_file.exists():
        return _from_field(read_json(old_file).get(_FIELD), f"{old_file}: {_FIELD}")
    return _from_field(config.get(_FIELD), f"{folder / 'tokenizer_config.json'}: {_FIELD}")


def _template_files(folder: Path) -> dict[str, Path]:
    default = folder / "chat_template.jinja"
    files = {"default": default} if default.exists() else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    return files


def _read_template(path: Path) -> ChatTemplateSource:
    return ChatTemplateSource(text=read_model_text(path), where=str(path))


def _from_field(value: object, where: str) -> dict[str, ChatTemplateSource]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": ChatTemplateSource(text=value, where=where)}
    entries = value if isinstance(value, list) else [value]
    templates: dict[str, ChatTemplateSource] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(text)}:
                templates[name] = ChatTemplateSource(text=text, where=f"{where} ({name})")
            case _:
                raise ModelFileError(f"{where} is neither a template nor a list of named ones")
    return templates
