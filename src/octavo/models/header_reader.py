"""HeaderReader: reads the front of a model file value by value, never past its end.

Every length in a model file is a claim. It is checked against what the file still holds before anything is read or
allocated, so that a truncated or hostile file ends in a `ModelFileError` that names the field. The file is read with
plain reads: nothing is mapped, so a file that shrinks later cannot fault.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from octavo.errors import MachineError, ModelFileError, ModelNotFoundError

_CHUNK_BYTES = 1 << 20
_U64 = Struct("<Q")


@contextmanager
def open_model_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for unbuffered reading; what the system says becomes one of our errors.

    Raises:
        ModelNotFoundError: there is no such file.
        MachineError: it may not be read, or the disk failed.
        ModelFileError: it is not a regular file.
    """
    try:
        # Without waiting: opening a pipe would last until somebody writes to it.
        file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise ModelFileError(f"{path}: is a folder, a file was expected") from error
    except OSError as error:
        raise MachineError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ModelFileError(f"{path}: is a device or a pipe, a file was expected")
        yield file
    except OSError as error:
        raise MachineError(f"{path}: reading failed: {error.strerror}") from error
    finally:
        file.close()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_into(file: BinaryIO, offset: int, target: memoryview) -> int:
    """Fill `target` with the bytes at `offset`; returns how many there were before the file ended."""
    done = 0
    while done < len(target):
        count = os.preadv(file.fileno(), [target[done : done + (1 << 30)]], offset + done)
        if count == 0:
            break
        done += count
    return done


class HeaderReader:
    """A cursor over the front of a file, with a buffer that grows only as far as the header is read.

    Args:
        file: Opened for reading; not closed here.
        max_bytes: Longest header that is believed; more is an error, not an allocation.
    """

    __slots__ = ("_buffer", "_file", "_max_bytes", "_path", "position", "size_bytes")

    def __init__(self, file: BinaryIO, path: Path, *, max_bytes: int) -> None:
        self._file = file
        self._path = path
        self._buffer = bytearray()
        self._max_bytes = max_bytes
        self.position = 0
        self.size_bytes = os.fstat(file.fileno()).st_size

    @property
    def remaining_bytes(self) -> int:
        return self.size_bytes - self.position

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes and move on."""
        self._fill(num_bytes, what)
        start = self.position
        self.position = start + num_bytes
        return bytes(self._buffer[start : self.position])

    def unpack(self, layout: Struct, what: str) -> tuple[int | float, ...]:
        """Read one fixed-size record."""
        self._fill(layout.size, what)
        values = layout.unpack_from(self._buffer, self.position)
        self.position += layout.size
        return values

    def text(self, what: str) -> str:
        """Read a string: its length as u64, then UTF-8 bytes."""
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """Read `count` strings. A vocabulary has hundreds of thousands, so the loop is flat."""
        self.check_room(count, 8, what)
        strings: list[str] = []
        for _ in range(count):
            self._fill(8, what)
            start = self.position + 8
            (length,) = _U64.unpack_from(self._buffer, self.position)
            self._fill(8 + length, what)
            self.position = start + length
            try:
                strings.append(self._buffer[start : self.position].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ModelFileError(f"{self._path}: {what} is not UTF-8 text") from error
        return strings

    def check_room(self, count: int, bytes_each: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold."""
        if count * bytes_each > self.remaining_bytes:
            raise ModelFileError(
                f"{self._path}: {what} is cut off: {count:,} entries of at least {bytes_each} B need "
                f"{count * bytes_each:,} B, {self.remaining_bytes:,} B are left in the file"
            )

    def _fill(self, num_bytes: int, what: str) -> None:
        """Have `num_bytes` beyond the position in the buffer."""
        end = self.position + num_bytes
        if end <= len(self._buffer):
            return
        if end > self.size_bytes:
            raise ModelFileError(
                f"{self._path}: {what} is cut off: {num_bytes:,} B needed at byte {self.position:,}, "
                f"{self.remaining_bytes:,} B are left in the file"
            )
        if end > self._max_bytes:
            raise ModelFileError(
                f"{self._path}: {what} is too long: {num_bytes:,} B at byte {self.position:,}",
                because=f"a header of more than {self._max_bytes:,} B is not believed",
            )
        start = len(self._buffer)
        chunk = bytearray(min(max(end - start, _CHUNK_BYTES), self.size_bytes - start))
        count = read_into(self._file, start, memoryview(chunk))
        if start + count < end:
            raise ModelFileError(f"{self._path}: {what} is cut off: the file became shorter while it was read")
        self._buffer += chunk[:count]
