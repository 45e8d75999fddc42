"""One file from the network to the disk: resumed when cut short, checked, and never seen half done.

The bytes grow in `NAME.part` beside the destination, which appears by an atomic rename once the checksum is right. A
leftover part of an interrupted download is continued; if the result is wrong, it is fetched once more from the start,
since the part may have come from another file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import IO, Protocol

from octavo.errors import DownloadError
from octavo.models.cache_folder import unwritable
from octavo.models.web import TransientError, Web, shown

CHUNK_BYTES = 1024**2
ATTEMPTS = 4
FIRST_PAUSE_S = 0.5


class Progress(Protocol):
    """Told how far a long piece of work is."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        """Take note: `stage` names the work (`downloading`, `unpacking` ...), `total_bytes` may be unknown."""


def ignore_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """Progress for those who do not look."""


def download(
    web: Web,
    url: str,
    destination: Path,
    *,
    sha256: str,
    progress: Progress,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch a file whose checksum is known.

    Args:
        destination: In a folder that exists; not touched unless all went well.
        sleep: Waits between attempts; tests pass one that does not.

    Raises:
        DownloadError: the server refuses, the connection keeps breaking, or the checksum is wrong.
        MachineError: the disk refuses.
    """
    part = part_of(destination)
    try:
        was_resumed = part.exists()
        _fetch(web, url, part, progress, sleep)
        found = sha256_of(part)
        if found != sha256 and was_resumed:
            part.unlink()
            _fetch(web, url, part, progress, sleep)
            found = sha256_of(part)
        if found != sha256:
            num_bytes = part.stat().st_size
            part.unlink()
            raise DownloadError(
                f"{shown(url)} is not the expected file",
                because=f"its {num_bytes:,} bytes have sha256 {found}, and {sha256} is right",
                hints=("a proxy or mirror may have changed it; set PIP_INDEX_URL to another index",),
            )
        part.replace(destination)
    except OSError as error:
        raise unwritable(part, error) from error


def part_of(destination: Path) -> Path:
    """Return where a file grows until it is complete."""
    return destination.with_name(destination.name + ".part")


def sha256_of(path: Path) -> str:
    """Return the checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_through(file: IO[bytes]) -> None:
    """Make sure that what was written survives a power cut before a rename makes it visible."""
    file.flush()
    os.fsync(file.fileno())


def _fetch(web: Web, url: str, part: Path, progress: Progress, sleep: Callable[[float], None]) -> None:
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _fetch_once(web, url, part, progress)
        except TransientError as error:
            if attempt == ATTEMPTS:
                raise DownloadError(
                    f"gave up after {ATTEMPTS} attempts: {error}",
                    hints=("run it again: what has arrived is kept, and the rest is fetched",),
                ) from error
            sleep(pause_s)
            pause_s *= 2
        else:
            return


def _fetch_once(web: Web, url: str, part: Path, progress: Progress) -> None:
    start = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        response = web.open(url, headers=headers)
    except DownloadError as error:
        if start and " 416 " in str(error):  # nothing left to send: the checksum will tell whether it is complete
            return
        raise
    with response:
        length = response.headers.get("Content-Length", "")  # type: ignore[attr-defined]
        if response.status != 206:  # type: ignore[attr-defined]
            start = 0  # the server sends all of it, asked or not
        total = start + int(length) if length.isdigit() else None
        with part.open("ab" if start else "wb") as file:
            done = _copy(response, file, start, total, progress)
            write_through(file)
    if total is not None and done != total:
        raise TransientError(f"{shown(url)} was cut short at {done:,} of {total:,} bytes")


def _copy(response: IO[bytes], file: IO[bytes], start: int, total: int | None, progress: Progress) -> int:
    done = start
    progress("downloading", done, total)
    while True:
        try:
            chunk = response.read(CHUNK_BYTES)
        except (HTTPException, OSError) as error:
            file.flush()
            raise TransientError(f"the connection broke after {done:,} bytes: {error}") from error
        if not chunk:
            return done
        file.write(chunk)
        done += len(chunk)
        progress("downloading", done, total)


def has_room(folder: Path, num_bytes: int) -> bool:
    """Say whether a folder's disk has room for so many bytes more."""
    return shutil.disk_usage(folder).free >= num_bytes
