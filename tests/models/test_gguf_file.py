"""Reading metadata and table of GGUF files, well-formed and not."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.gguf_file import KIND_BY_TYPE_ID, read_gguf_header
from octavo.testing.tiny_gguf import write_gguf_model
from octavo.testing.tiny_models import TinyModel


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def field(name, type_id, value):
    return text(name) + struct.pack("<I", type_id) + value


def table_row(name, dimensions, type_id=0, offset=0):
    packed = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + packed + struct.pack("<IQ", type_id, offset)


def build(path, fields=(), rows=(), data=b"", *, version=3, alignment=32):
    head = b"GGUF" + struct.pack("<IQQ", version, len(rows), len(fields)) + b"".join(fields) + b"".join(rows)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def test_header_of_a_written_model_equals_what_the_reference_reader_finds(tmp_path):
    path = write_gguf_model(TinyModel(), tmp_path / "tiny.gguf", kind="q4_1")
    reference = gguf.GGUFReader(path)

    header = read_gguf_header(path)

    fields = {name: found.contents() for name, found in reference.fields.items() if not name.startswith("GGUF.")}
    assert set(header.metadata) == set(fields)
    for name, value in header.metadata.items():
        assert (list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value) == fields[name]
    for tensor in reference.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert entry.kind == tensor.tensor_type.name.lower()
        assert (entry.offset_bytes, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_alignment_of_the_file_is_honoured(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(alignment)
    tensors = {name: np.random.default_rng(size).random(size, dtype=np.float32) for name, size in (("a", 3), ("b", 5))}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_gguf_header(tmp_path / "aligned.gguf")

    content = (tmp_path / "aligned.gguf").read_bytes()
    for name, tensor in tensors.items():
        entry = header.tensors[name]
        assert entry.offset_bytes % alignment == 0
        assert content[entry.offset_bytes : entry.offset_bytes + entry.num_bytes] == tensor.tobytes()


def test_every_type_of_metadata_is_read(tmp_path):
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ", 4, 2) + struct.pack("<2I", 1, 2) + struct.pack("<IQ", 8, 1)
    values = [
        ("u8", 0, struct.pack("<B", 200), 200),
        ("i8", 1, struct.pack("<b", -3), -3),
        ("u16", 2, struct.pack("<H", 60_000), 60_000),
        ("i16", 3, struct.pack("<h", -300), -300),
        ("u32", 4, struct.pack("<I", 2**32 - 1), 2**32 - 1),
        ("i32", 5, struct.pack("<i", -(2**31)), -(2**31)),
        ("f32", 6, struct.pack("<f", 0.5), 0.5),
        ("bool", 7, b"\x01", True),
        ("text", 8, text("grüße"), "grüße"),
        ("u64", 10, struct.pack("<Q", 2**64 - 1), 2**64 - 1),
        ("i64", 11, struct.pack("<q", -(2**63)), -(2**63)),
        ("f64", 12, struct.pack("<d", 1e-300), 1e-300),
        ("numbers", 9, struct.pack("<IQ3h", 3, 3, -1, 0, 7), [-1, 0, 7]),
        ("flags", 9, struct.pack("<IQ", 7, 2) + b"\x00\x01", [False, True]),
        ("texts", 9, struct.pack("<IQ", 8, 2) + text("") + text("b"), ["", "b"]),
        ("nested", 9, nested + text("c"), [[1, 2], ["c"]]),
        ("nothing", 9, struct.pack("<IQ", 6, 0), []),
    ]
    path = build(tmp_path / "all.gguf", [field(name, type_id, value) for name, type_id, value, _ in values])

    metadata = read_gguf_header(path).metadata

    plain = {
        name: [list(item) for item in value] if name == "nested" else list(value) if type_id == 9 else value
        for (name, type_id, _, _), value in zip(values, metadata.values(), strict=True)
    }
    assert plain == {name: expected for name, _, _, expected in values}


def test_version_2_is_read_like_version_3(tmp_path):
    path = build(tmp_path / "v2.gguf", [field("a", 4, struct.pack("<I", 5))], version=2)

    assert read_gguf_header(path).metadata == {"a": 5}


@pytest.mark.parametrize(
    ("fields", "rows", "data", "message"),
    [
        ([field("a", 13, b"")], [], b"", "'a' has type 13"),
        ([field("a", 7, b"\x02")], [], b"", "'a' is neither true nor false"),
        ([field("a", 0, b"\x01"), field("a", 0, b"\x02")], [], b"", "'a' appears twice"),
        ([field("a", 8, struct.pack("<Q", 2**63))], [], b"", "a is cut off"),
        ([field("a", 8, text(b"\xff"))], [], b"", "a is not UTF-8"),
        ([field("a", 9, struct.pack("<IQ", 8, 2**60))], [], b"", "a is cut off"),
        ([field("a", 9, struct.pack("<IQ", 4, 2**60))], [], b"", "a is cut off"),
        ([field("a", 9, struct.pack("<IQ", 9, 1) * 9)], [], b"", "nests arrays more than"),
        ([field("general.alignment", 4, struct.pack("<I", 0))], [], b"", "general.alignment is 0"),
        ([field("general.alignment", 4, struct.pack("<I", 24))], [], b"", "general.alignment is 24"),
        ([field("general.alignment", 8, text("32"))], [], b"", "general.alignment is '32'"),
        ([], [table_row("t", [])], b"", "'t' has 0 dimensions"),
        ([], [table_row("t", [1] * 5)], bytes(4), "'t' has 5 dimensions"),
        ([], [table_row("t", [2**63, 2**63])], bytes(64), "'t' is cut off"),
        ([], [table_row("t", [8])], bytes(31), "'t' is cut off"),
        ([], [table_row("t", [8], offset=4)], bytes(64), "multiples of the alignment, 32"),
        ([], [table_row("t", [8], offset=2**63)], bytes(64), "'t' is cut off"),
        ([], [table_row("t", [16]), table_row("u", [8], offset=32)], bytes(96), "'u' overlaps"),
        ([], [table_row("t", [8]), table_row("t", [8], offset=32)], bytes(96), "'t' appears twice"),
        ([], [table_row("t", [48, 2], type_id=8)], bytes(200), "rows of 48 values cannot be q8_0"),
    ],
)
def test_contradiction_is_an_error_that_says_what_and_where(tmp_path, fields, rows, data, message):
    path = build(tmp_path / "bad.gguf", fields, rows, data)

    with pytest.raises(ModelFileError) as caught:
        read_gguf_header(path)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file type is cut off"),
        (b"GGU", "file type is cut off"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 3), "number of tensors is cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "table of tensors is cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "metadata is cut off"),
    ],
)
def test_start_that_promises_more_than_the_file_holds_is_an_error(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)

    with pytest.raises(ModelFileError, match=message):
        read_gguf_header(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("version", "fields", "rows", "message"),
    [
        (1, [], [], "GGUF version 1"),
        (4, [], [], "GGUF version 4"),
        (3 << 24, [], [], "big-endian"),
        (3, [field("split.count", 2, struct.pack("<H", 4))], [], "one of 4 parts"),
        (3, [], [table_row("t", [8], type_id=4)], "'t' has type 4"),
        (3, [], [table_row("t", [8], type_id=26)], "'t' has type 26"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, version, fields, rows, message):
    path = build(tmp_path / "other.gguf", fields, rows, bytes(64), version=version)

    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf_header(path)


def test_header_is_read_across_the_edge_of_the_buffer(tmp_path):
    """Metadata of 3 MB is read in pieces of 1 MiB; the entries on the edges come out whole."""
    names = [f"token {i}" * 4 for i in range(80_000)]
    value = struct.pack("<IQ", 8, len(names)) + b"".join(text(name) for name in names)
    path = build(tmp_path / "long.gguf", [field("names", 9, value), field("last", 0, b"\x07")])
    assert path.stat().st_size > 3 * 2**20

    metadata = read_gguf_header(path).metadata

    assert metadata == {"names": names, "last": 7}


def test_type_numbers_are_those_of_the_format():
    for type_id, kind in KIND_BY_TYPE_ID.items():
        assert gguf.GGMLQuantizationType(type_id).name.lower() == kind
