"""Text that a person names as a file: read with a limit, so that no file, device or pipe is read without end.

Pipes are read as files are (`--calibrate <(zcat start.log.gz)`), unless nobody writes to them.
"""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from octavo.errors import InvalidParameterError, MachineError
from octavo.units import format_bytes

_CHUNK_BYTES = 1 << 20


def read_text_file(
    path: Path,
    *,
    param: str,
    what: str,
    max_bytes: int,
    encoding: Literal["utf-8", "utf-8-sig"] = "utf-8",
    is_lenient: bool = False,
    hints: tuple[str, ...] = (),
) -> str:
    """Return the text of a file.

    Args:
        param: The option that names it, for errors.
        what: What it should be, as `a trace`.
        max_bytes: The most that it may hold.
        is_lenient: Take UTF-16 too, and replace what is neither instead of refusing it.
        hints: What to do about a file that is longer; not said of a device or pipe.

    Raises:
        MachineError: it cannot be read.
        InvalidParameterError: it is a folder, longer, or no UTF-8 text.
    """
    data = _bytes_of(path, param=param, what=what, max_bytes=max_bytes, hints=hints)
    return _decoded(data, str(path), param=param, what=what, encoding=encoding, is_lenient=is_lenient)


def read_text_stream(stream: BinaryIO, *, param: str, what: str, max_bytes: int) -> str:
    """Return the text of standard input.

    Raises:
        As `read_text_file`.
    """
    try:
        data = stream.read(max_bytes + 1)
    except OSError as error:
        raise MachineError("standard input cannot be read", because=_reason(error)) from error
    if len(data) > max_bytes:
        raise _too_long("standard input", param=param, what=what, max_bytes=max_bytes, hints=())
    return _decoded(data, "standard input", param=param, what=what, encoding="utf-8", is_lenient=False)


def _bytes_of(path: Path, *, param: str, what: str, max_bytes: int, hints: tuple[str, ...]) -> bytes:
    try:
        # Without waiting: opening a pipe would last until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
        raise MachineError(f"{path}: cannot be read", because=_reason(error)) from error
    try:
        kind = os.fstat(descriptor)
        if stat.S_ISDIR(kind.st_mode):
            raise InvalidParameterError(f"{path} is a folder", param=param, because=f"{what} is a file")
        if stat.S_ISREG(kind.st_mode) and kind.st_size > max_bytes:
            raise _too_long(str(path), param=param, what=what, max_bytes=max_bytes, hints=hints)
        data = _take(descriptor, max_bytes)
    except OSError as error:
        raise MachineError(f"{path}: cannot be read", because=_reason(error)) from error
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise _too_long(str(path), param=param, what=what, max_bytes=max_bytes, hints=())
    if not data and stat.S_ISFIFO(kind.st_mode):
        raise InvalidParameterError(f"{path} is a pipe that nothing comes from", param=param)
    return data


def _take(descriptor: int, max_bytes: int) -> bytes:
    """Read to the end, or one byte further than may be."""
    data = bytearray()
    while len(data) <= max_bytes:
        try:
            chunk = os.read(descriptor, min(_CHUNK_BYTES, max_bytes + 1 - len(data)))
        except BlockingIOError:  # somebody will write, so waiting ends
            os.set_blocking(descriptor, True)
            continue
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _decoded(data: bytes, name: str, *, param: str, what: str, encoding: str, is_lenient: bool) -> str:
    if is_lenient and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")  # what a redirection writes in some shells
    try:
        return data.decode(encoding, errors="replace" if is_lenient else "strict")
    except UnicodeDecodeError as error:
        raise InvalidParameterError(
            f"{name} is not text", param=param, because=f"{what} is UTF-8, and byte {error.start:,} is not"
        ) from error


def _too_long(name: str, *, param: str, what: str, max_bytes: int, hints: tuple[str, ...]) -> InvalidParameterError:
    return InvalidParameterError(
        f"{name} holds more than {format_bytes(max_bytes)}",
        param=param,
        because=f"{what} of that length is not read",
        hints=hints,
    )


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
