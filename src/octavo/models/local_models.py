"""Where a model lies on this disk, if it is there; no network, and nothing that speaks to one is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from octavo.models.aliases import PackagedModel, find_place
from octavo.models.cache_folder import cache_folder


def local_path(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return where a model lies if it is on this disk already; `None` if it would have to be fetched.

    Raises:
        ModelNotFoundError: nothing by that name.
    """
    place = find_place(model)
    if isinstance(place, PackagedModel):
        path = cached_path(place, environ)
        return path if is_complete(path, place) else None
    return place if isinstance(place, Path) else None


def cached_path(model: PackagedModel, environ: Mapping[str, str]) -> Path:
    """Return where the file of a packaged model is kept, whether or not it is there."""
    return cache_folder(environ) / "models" / model.alias / model.file_name


def is_complete(path: Path, model: PackagedModel) -> bool:
    """Return whether the file of a packaged model is there, whole."""
    # The file appeared by a rename after its checksum was right, so its size tells enough; reading 94 MiB at every
    # start would not. `octavo pull` checks all of it.
    try:
        return path.stat().st_size == model.file_bytes
    except OSError:
        return False
