"""Reading the table of safetensors files, well-formed and not."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from octavo.models.safetensors_file import read_safetensors_directory
from octavo.testing.tiny_models import write_safetensors


def write(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_table_lists_every_tensor_where_it_lies(tmp_path):
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, dtype=np.float32)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": first, "b": second})

    table = read_safetensors_directory(path)

    assert list(table) == ["a", "b"]
    assert (table["a"].shape, table["a"].kind, table["a"].num_bytes) == ((2, 3), "f32", 24)
    assert table["b"].shape == (5,)
    content = path.read_bytes()
    for name, tensor in (("a", first), ("b", second)):
        start = table[name].offset_bytes
        assert content[start : start + table[name].num_bytes] == tensor.tobytes()


def test_file_of_the_reference_writer_is_read(tmp_path):
    from safetensors.numpy import save_file

    tensors = {"x": np.ones((3, 4), np.float16), "y": np.zeros((7,), np.float32), "empty": np.zeros((0, 4), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np"})

    table = read_safetensors_directory(tmp_path / "model.safetensors")

    assert {name: found.shape for name, found in table.items()} == {"x": (3, 4), "y": (7,), "empty": (0, 4)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"t": entry()}, bytes(20), "'t' is cut off: it ends at byte"),
        ({"t": entry()}, bytes(25), "its tensors end at byte"),
        ({"t": entry(offsets=(0, 20))}, bytes(20), "takes 20 B in the file, 24 B were expected"),
        ({"t": entry(offsets=(24, 0))}, bytes(24), "takes -24 B"),
        ({"t": entry(offsets=(4, 28))}, bytes(28), "starts at byte"),
        ({"a": entry(), "b": entry(offsets=(12, 36))}, bytes(36), "'b' starts at byte"),
        ({"t": entry(shape=(2, -3))}, bytes(24), "a list of sizes was expected"),
        ({"t": entry(shape=(2, 2**70))}, bytes(24), "a list of sizes was expected"),
        ({"t": entry(shape=(1,) * 9, offsets=(0, 4))}, bytes(4), "a list of sizes was expected"),
        ({"t": entry(shape=(True, 6))}, bytes(24), "a list of sizes was expected"),
        ({"t": entry(offsets=(0,))}, bytes(24), "a pair of byte offsets"),
        ({"t": entry(dtype="F31")}, bytes(24), 'dtype "F31"'),
        ({"t": entry(dtype=["F32"])}, bytes(24), 'dtype ["F32"]'),
        ({"t": 5}, b"", "'t' is not described by an object"),
        (b'{"t": {}, "t": {}}', b"", "'t' appears twice"),
        (b"[1]", b"", "a JSON object was expected, found list"),
        (b"{nonsense", b"", "not JSON"),
        (b"\xff\xfe", b"", "not UTF-8"),
        (b"[" * 200_000, b"", "nested too deeply"),
        (b'{"t": ' + b"9" * 5000 + b"}", b"", "4300 digits"),
    ],
)
def test_contradiction_is_an_error_that_says_what_and_where(tmp_path, header, data, message):
    path = write(tmp_path / "bad.safetensors", header, data)

    with pytest.raises(ModelFileError, match=r"bad\.safetensors") as caught:
        read_safetensors_directory(path)

    assert message in str(caught.value)


@pytest.mark.parametrize("length", [10, 2**40, 2**64 - 1])
def test_header_length_beyond_the_file_is_an_error_not_an_allocation(tmp_path, length):
    path = write(tmp_path / "bad.safetensors", b"{}", length=length)

    with pytest.raises(ModelFileError, match="header is cut off"):
        read_safetensors_directory(path)


def test_header_longer_than_any_real_one_is_refused_unread(tmp_path):
    path = tmp_path / "bad.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # a hole: takes no disk

    with pytest.raises(ModelFileError, match="header is too long"):
        read_safetensors_directory(path)


def test_type_that_is_not_run_is_refused_by_name(tmp_path):
    path = write(tmp_path / "fp8.safetensors", {"t": entry(dtype="F8_E4M3", offsets=(0, 6))}, bytes(6))

    with pytest.raises(UnsupportedModelError, match="tensor 't' has dtype F8_E4M3"):
        read_safetensors_directory(path)


def test_missing_file_and_folder_are_told_apart(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_safetensors_directory(tmp_path / "none.safetensors")
    with pytest.raises(ModelFileError, match="is a folder"):
        read_safetensors_directory(tmp_path)
