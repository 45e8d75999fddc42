"""From a MODEL argument to what can be known of it here: files on this disk, or published sizes.

an alias            its file where it is on this disk, else the sizes that come with the package
a path              a folder, a `.gguf` file, or a lone `config.json`
a bundled name      `llama-3-70b`, `meta-llama/Meta-Llama-3-70B`: the catalogue, no network
any other hub id    its `config.json` alone, from the hub or the hub's cache
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import DownloadError, ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.models.aliases import ALIASES, HubId, find_place
from octavo.models.catalogue import find_model
from octavo.models.config import spec_from_hf
from octavo.models.gguf_file import read_gguf_header
from octavo.models.gguf_shape import shape_from_gguf
from octavo.models.json_file import read_json
from octavo.models.load import OpenedModel, open_model
from octavo.models.local_models import local_path
from octavo.models.packaged_sizes import PACKAGED_SIZES
from octavo.models.safetensors_file import read_safetensors_directory
from octavo.models.shape import ModelShape
from octavo.models.shape_config import shape_from_hf
from octavo.models.spec import ModelSpec
from octavo.models.spec_shape import shape_of_spec
from octavo.models.tensor_kinds import TensorKind
from octavo.planner.subject import Subject, stored_tensors

_STORED: Mapping[str, TensorKind] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def find_subject(model: str, environ: Mapping[str, str], *, is_bundled_only: bool = False) -> Subject:
    """Return the model that a MODEL argument means.

    Args:
        is_bundled_only: Look neither at paths nor at the network.

    Raises:
        ModelError: nothing by that name, or a model whose bytes we do not know how to count.
    """
    if model in ALIASES:
        path = local_path(model, environ)
        return _alias(model) if path is None else _opened(open_model(path), model, name=model)
    if not is_bundled_only:
        on_disk = _on_disk(model)
        if on_disk is not None:
            return replace(on_disk, is_on_disk=True)
    try:
        found = find_model(model)
    except ModelNotFoundError as unlisted:
        place = None if is_bundled_only else _hub_id(model)
        if place is None:
            raise
        config = read_json(_config_from_hub(place, environ, unlisted))
        return _published(config, name=place.repository, asked=model, source=f"config.json of {place.repository}")
    return _published(found.config, name=found.name, asked=found.name, source=f"bundled config.json: {found.source}")


def _config_from_hub(place: HubId, environ: Mapping[str, str], unlisted: ModelNotFoundError) -> Path:
    """Fetch a configuration; where that fails, the name may be a slip of one that comes with the package."""
    from octavo.models.hub import fetch_config  # noqa: PLC0415 - only here is anything of the network needed

    try:
        return fetch_config(place, environ)
    except (DownloadError, ModelNotFoundError) as error:
        meant = tuple(hint for hint in unlisted.hints if hint.startswith("did you mean"))
        raise type(error)(error.message, because=error.because, hints=(*meant, *error.hints)) from error


def _on_disk(model: str) -> Subject | None:
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.exists() and not path.is_dir():
        config = read_json(path)
        return _published(config, name=path.resolve().parent.name, asked=model, source=str(path))
    try:
        place = find_place(model)
    except ModelNotFoundError:
        if path.suffix in (".gguf", ".json") or model.startswith((".", "/", "~")):
            raise
        return None
    return _from_path(place, model) if isinstance(place, Path) else None


def _from_path(path: Path, asked: str) -> Subject:
    config_path = path / "config.json"
    try:
        opened = open_model(path)
    except (UnsupportedModelError, ModelFileError) as error:
        # What Octavo does not run can still be counted, and a configuration without weights, too.
        if not config_path.is_file():
            if isinstance(error, UnsupportedModelError):
                return _counted_gguf(path, asked, error)
            raise
        config = read_json(config_path)
        subject = _published(config, name=path.resolve().name, asked=asked, source=str(config_path))
        if isinstance(error, ModelFileError) and list(path.glob("*.safetensors")):
            raise
        return _with_stored_bytes(subject, path)
    return _opened(opened, asked, name=path.stem if path.is_file() else path.resolve().name)


def _counted_gguf(path: Path, asked: str, refusal: UnsupportedModelError) -> Subject:
    """Count a GGUF file of a model that Octavo does not run.

    Raises:
        UnsupportedModelError: it cannot be counted either.
    """
    file = path if path.is_file() else next(iter(sorted(path.glob("*.gguf"))), None)
    if file is None:
        raise refusal
    header = read_gguf_header(file)
    return Subject(
        name=file.stem,
        asked=asked,
        source=f"headers of {file.name}",
        shape=shape_from_gguf(header, name=file.stem),
        octavo_refusal=refusal,
        stored_bytes=sum(entry.num_bytes for entry in header.tensors.values()),
        stored_source=f"headers of {file.name}",
    )


def _with_stored_bytes(subject: Subject, folder: Path) -> Subject:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return subject
    stored = sum(entry.num_bytes for file in files for entry in read_safetensors_directory(file).values())
    return subject.with_stored_bytes(stored, source=f"headers of {len(files)} safetensors files")


def _hub_id(model: str) -> HubId | None:
    try:
        place = find_place(model)
    except ModelNotFoundError:
        return None
    return place if isinstance(place, HubId) else None


def _opened(opened: OpenedModel, asked: str, *, name: str) -> Subject:
    return Subject(
        name=name,
        asked=asked,
        source=f"headers of {opened.path.name}",
        shape=_shape_of(opened, name),
        opened=opened,
        spec=opened.spec,
        stored_bytes=opened.weight_bytes,
        stored_source=f"headers of {opened.path.name}",
        is_alias=asked in ALIASES,
    )


def _shape_of(opened: OpenedModel, name: str) -> ModelShape:
    config_path = opened.path / "config.json"
    if opened.format == "safetensors":
        return shape_from_hf(read_json(config_path), where=str(config_path), name=name)
    return shape_of_spec(opened.spec)


def _alias(alias: str) -> Subject:
    sizes = PACKAGED_SIZES[alias]
    spec = spec_from_hf(sizes.config, where=alias, name=alias)
    return Subject(
        name=alias,
        asked=alias,
        source=f"sizes of {ALIASES[alias].file_name} ({ALIASES[alias].package} {ALIASES[alias].version})",
        shape=shape_from_hf(sizes.config, where=alias, name=alias),
        spec=spec,
        stored=stored_tensors(spec, sizes.kind_of),
        is_alias=True,
    )


def _published(config: Mapping[str, Any], *, name: str, asked: str, source: str) -> Subject:
    """Count a configuration; whether Octavo runs it is said only when that is asked."""
    shape = shape_from_hf(config, where=name, name=name)
    spec: ModelSpec | None = None
    refusal: ModelError | None = None
    try:
        spec = spec_from_hf(config, where=name, name=name)
    except ModelError as error:
        refusal = error
    kind = _STORED.get(shape.dtype, "bf16")
    return Subject(
        name=name,
        asked=asked,
        source=source,
        shape=shape,
        spec=spec,
        stored=stored_tensors(spec, lambda _name, _shape: kind) if spec is not None else (),
        octavo_refusal=refusal,
    )
