"""The GGUF format, versions 2 and 3: metadata, a table of tensors, then their bytes. Standard library only.

    "GGUF", version u32, number of tensors u64, number of metadata entries u64
    metadata      name, type u32, value                                   (a string is a u64 length and UTF-8 bytes)
    tensors       name, number of dimensions u32, dimensions u64 (row length first), type u32, offset u64
    data          from the next multiple of the alignment; offsets count from here

Source: the GGUF description in the ggml repository.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from struct import Struct
from typing import TypeAlias

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.header_reader import HeaderReader, open_model_file
from octavo.models.tensor_entry import FileStamp, TensorEntry
from octavo.models.tensor_kinds import TensorKind, row_bytes
from octavo.units import round_up

MAX_HEADER_BYTES = 512 * 1024**2
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

KIND_BY_TYPE_ID: dict[int, TensorKind] = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    29: "iq1_m",
    30: "bf16",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
}
"""Tensor types by their number in the file; numbers left out are types no model we run stores weights in."""

MetadataValue: TypeAlias = (
    "bool | int | float | str | list[str] | list[bool] | array[int] | array[float] | list[MetadataValue]"
)
Metadata = Mapping[str, MetadataValue]

_U32 = Struct("<I")
_U64 = Struct("<Q")
_NUMBERS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything of a GGUF file but its tensors' bytes."""

    path: Path
    version: int
    metadata: Metadata
    tensors: Mapping[str, TensorEntry]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and table of a GGUF file.

    Raises:
        ModelFileError: not GGUF, truncated, or its parts contradict each other.
        UnsupportedModelError: an old version, a big-endian file, a part of a split file, or an unknown tensor type.
    """
    with open_model_file(path) as file:
        stamp = FileStamp.of(file.fileno())
        reader = HeaderReader(file, path, max_bytes=MAX_HEADER_BYTES)
        version, num_tensors, num_entries = _read_start(reader, path)
        metadata = _read_metadata(reader, path, num_entries)
        _refuse_split(metadata, path)
        alignment = _alignment(metadata, path)
        tensors = _read_tensors(reader, path, num_tensors, stamp)
        data_start = round_up(reader.position, alignment)
    tensors = {name: _placed(entry, data_start, alignment) for name, entry in tensors.items()}
    _check_places(tensors, path, data_start, stamp.size_bytes)
    return GgufHeader(path=path, version=version, metadata=metadata, tensors=tensors)


def _read_start(reader: HeaderReader, path: Path) -> tuple[int, int, int]:
    if reader.take(4, "file type") != b"GGUF":
        raise ModelFileError(f"{path}: not a GGUF file: it does not start with GGUF")
    version = _whole(reader, _U32, "version")
    if version not in (2, 3):
        if version >= 1 << 16:
            raise UnsupportedModelError(f"{path}: a big-endian GGUF file; only little-endian ones can be read")
        raise UnsupportedModelError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors = _whole(reader, _U64, "number of tensors")
    num_entries = _whole(reader, _U64, "number of metadata entries")
    # The smallest entries: an empty name, a type and one byte; a name, one dimension, a type and an offset.
    reader.check_room(num_entries, 8 + 4 + 1, "metadata")
    reader.check_room(num_tensors, 8 + 4 + 8 + 4 + 8, "table of tensors")
    return version, num_tensors, num_entries


def _read_metadata(reader: HeaderReader, path: Path, num_entries: int) -> Metadata:
    metadata: dict[str, MetadataValue] = {}
    for index in range(num_entries):
        name = reader.text(f"name of metadata entry {index}")
        if name in metadata:
            raise ModelFileError(f"{path}: metadata field {name!r} appears twice")
        metadata[name] = _read_value(reader, path, _whole(reader, _U32, name), name, depth=0)
    return metadata


def _read_value(reader: HeaderReader, path: Path, type_id: int, what: str, *, depth: int) -> MetadataValue:
    if type_id in _NUMBERS:
        return reader.unpack(_NUMBERS[type_id], what)[0]
    if type_id == _STRING:
        return reader.text(what)
    if type_id == _BOOL:
        return _booleans(reader.take(1, what), path, what)[0]
    if type_id != _ARRAY:
        raise ModelFileError(f"{path}: metadata field {what!r} has type {type_id}, which GGUF does not know")
    item_type = _whole(reader, _U32, what)
    count = _whole(reader, _U64, what)
    if item_type == _STRING:
        return reader.texts(count, what)
    if item_type == _BOOL:
        reader.check_room(count, 1, what)
        return _booleans(reader.take(count, what), path, what)
    if item_type in _NUMBERS:
        return _read_numbers(reader, _NUMBERS[item_type], count, what)
    if depth == MAX_ARRAY_DEPTH:
        raise ModelFileError(f"{path}: metadata field {what!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    reader.check_room(count, 4 + 8, what)
    return [_read_value(reader, path, item_type, what, depth=depth + 1) for _ in range(count)]


def _read_numbers(reader: HeaderReader, layout: Struct, count: int, what: str) -> array[int] | array[float]:
    reader.check_room(count, layout.size, what)
    numbers = array(layout.format[1:])
    assert numbers.itemsize == layout.size
    numbers.frombytes(reader.take(count * layout.size, what))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _booleans(values: bytes, path: Path, what: str) -> list[bool]:
    if values.translate(None, b"\x00\x01"):
        raise ModelFileError(f"{path}: metadata field {what!r} is neither true nor false")
    return [bool(value) for value in values]


def _refuse_split(metadata: Metadata, path: Path) -> None:
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{path}: one of {parts} parts of a split GGUF file",
            hints=("join the parts first: `llama-gguf-split --merge FIRST_PART.gguf JOINED.gguf`",),
        )


def _alignment(metadata: Metadata, path: Path) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not is_power or not isinstance(alignment, int):
        raise ModelFileError(
            f"{path}: general.alignment is {alignment!r}, a power of two up to {MAX_ALIGNMENT:,} was expected"
        )
    return alignment


def _read_tensors(reader: HeaderReader, path: Path, num_tensors: int, stamp: FileStamp) -> dict[str, TensorEntry]:
    """Read the table; offsets still count from the start of the data."""
    entries: dict[str, TensorEntry] = {}
    for index in range(num_tensors):
        name = reader.text(f"name of tensor {index}")
        where = f"{path}: tensor {name!r}"
        if name in entries:
            raise ModelFileError(f"{where} appears twice")
        num_dimensions = _whole(reader, _U32, where)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ModelFileError(f"{where} has {num_dimensions} dimensions, 1 to {MAX_DIMENSIONS} were expected")
        shape = tuple(_whole(reader, _U64, where) for _ in range(num_dimensions))[::-1]
        type_id = _whole(reader, _U32, where)
        if type_id not in KIND_BY_TYPE_ID:
            raise UnsupportedModelError(f"{where} has type {type_id}, which cannot be read")
        kind = KIND_BY_TYPE_ID[type_id]
        entries[name] = TensorEntry(
            name=name,
            shape=shape,
            kind=kind,
            path=path,
            offset_bytes=_whole(reader, _U64, where),
            num_bytes=prod(shape[:-1]) * row_bytes(kind, shape[-1], tensor=where),
            stamp=stamp,
        )
    return entries


def _placed(entry: TensorEntry, data_start: int, alignment: int) -> TensorEntry:
    if entry.offset_bytes % alignment:
        raise ModelFileError(
            f"{entry.path}: tensor {entry.name!r} has offset {entry.offset_bytes:,}",
            because=f"offsets are multiples of the alignment, {alignment}",
        )
    return replace(entry, offset_bytes=data_start + entry.offset_bytes)


def _check_places(tensors: Mapping[str, TensorEntry], path: Path, data_start: int, size_bytes: int) -> None:
    """Tensors lie inside the file and do not overlap; padding between and after them is allowed."""
    position = data_start
    for entry in sorted(tensors.values(), key=lambda entry: (entry.offset_bytes, entry.num_bytes)):
        if entry.offset_bytes < position:
            raise ModelFileError(f"{path}: tensor {entry.name!r} overlaps the tensor before it")
        position = entry.offset_bytes + entry.num_bytes
        if position > size_bytes:
            raise ModelFileError(
                f"{path}: tensor {entry.name!r} is cut off: it ends at byte {position:,}, the file has {size_bytes:,} B"
            )


def _whole(reader: HeaderReader, layout: Struct, what: str) -> int:
    value = reader.unpack(layout, what)[0]
    assert isinstance(value, int)
    return value
