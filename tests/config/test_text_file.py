"""Files that a person names: text is read up to a limit, whatever stands behind the path."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest

from octavo.config.text_file import read_text_file, read_text_stream
from octavo.errors import InvalidParameterError, MachineError

LIMIT = 1000


def read(path: Path, **options) -> str:
    return read_text_file(path, param="--notes", what="a note", max_bytes=LIMIT, **options)


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    path = tmp_path / "note"
    path.write_text("é" * (LIMIT // 2))
    assert read(path) == "é" * (LIMIT // 2)
    path.write_text("é" * (LIMIT // 2) + "x")
    with pytest.raises(InvalidParameterError, match=r"^--notes: .*note holds more than 1000 B") as caught:
        read(path, hints=("shorten it",))
    assert "a note of that length is not read" in str(caught.value)
    assert caught.value.hints == ("shorten it",)


def test_a_huge_file_is_refused_by_its_size_alone(tmp_path):
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(10 * 1024**3)  # takes no room on the disk, and minutes to read
    with pytest.raises(InvalidParameterError, match="holds more than"):
        read(path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_device_without_end_is_left_at_the_limit(device):
    with pytest.raises(InvalidParameterError, match=f"{device} holds more than 1000 B"):
        read(Path(device))


def test_a_folder_and_what_is_not_there_are_told_apart(tmp_path):
    with pytest.raises(InvalidParameterError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(MachineError, match="cannot be read") as caught:
        read(tmp_path / "absent")
    assert "No such file" in str(caught.value)
    with pytest.raises(MachineError, match="cannot be read"):
        read(Path("a\0b"))
    with pytest.raises(MachineError, match="cannot be read"):
        read(Path("x" * 5000))


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidParameterError, match="pipe that nothing comes from"):
        read(path)


def test_a_pipe_is_read_to_its_end_however_late_its_text_comes():
    source, sink = os.pipe()

    def write() -> None:
        os.write(sink, b"late ")
        os.write(sink, b"words")
        os.close(sink)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert read(Path(f"/dev/fd/{source}")) == "late words"
    finally:
        writer.join()
        os.close(source)


def test_an_endless_pipe_is_left_at_the_limit(tmp_path):
    source, sink = os.pipe()
    os.write(sink, b"x" * (LIMIT + 1))
    try:
        with pytest.raises(InvalidParameterError, match="holds more than"):
            read(Path(f"/dev/fd/{source}"))
    finally:
        os.close(source)
        os.close(sink)


def test_bytes_that_are_no_text_are_named_or_replaced(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"ab\xff\xfe")
    with pytest.raises(InvalidParameterError, match="is not text") as caught:
        read(path)
    assert "byte 2" in str(caught.value)
    assert read(path, is_lenient=True) == "ab��"
    path.write_bytes(b"\xef\xbb\xbfmarked")
    assert read(path, encoding="utf-8-sig") == "marked"


def test_standard_input_has_the_same_limit():
    def stream(text: bytes) -> str:
        return read_text_stream(io.BytesIO(text), param="--notes", what="a note", max_bytes=LIMIT)

    assert stream(b"x" * LIMIT) == "x" * LIMIT
    with pytest.raises(InvalidParameterError, match="standard input holds more than"):
        stream(b"x" * (LIMIT + 1))
    with pytest.raises(InvalidParameterError, match="standard input is not text"):
        stream(b"\xff")
