"""The safetensors format: a JSON table of tensors, then their bytes. Standard library only, nothing mapped.

    8 bytes       length of the header, little endian
    header        {"name": {"dtype": "BF16", "shape": [49152, 576], "data_offsets": [0, 56623104]}, "__metadata__": {}}
    data          the tensors back to back, covering it exactly

Source: the format description in the safetensors repository, including its rules (no holes, no overlaps, at most
100 MB of header).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from struct import Struct

from octavo.errors import ModelFileError, UnsupportedModelError
from octavo.models.header_reader import HeaderReader, open_model_file
from octavo.models.json_file import parse_json
from octavo.models.tensor_entry import FileStamp, TensorEntry
from octavo.models.tensor_kinds import KIND_LAYOUTS

MAX_HEADER_BYTES = 100_000_000
_LENGTH = Struct("<Q")
_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_OTHER_DTYPES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64", "C64"),
    *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"),
)
MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 63


def read_safetensors_directory(path: Path) -> dict[str, TensorEntry]:
    """Read the table of a safetensors file.

    Raises:
        ModelFileError: truncated, or a tensor's dtype, shape and offsets contradict each other or the file's size.
        UnsupportedModelError: a tensor's type is not a float type we run.
    """
    with open_model_file(path) as file:
        stamp = FileStamp.of(file.fileno())
        reader = HeaderReader(file, path, max_bytes=8 + MAX_HEADER_BYTES)
        (header_bytes,) = reader.unpack(_LENGTH, "header length")
        assert isinstance(header_bytes, int)
        text = reader.take(header_bytes, "header")
    header = parse_json(text, str(path))
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = {name: _entry(name, fields, path, data_start, stamp) for name, fields in header.items()}
    _check_coverage(entries, path, data_start, stamp.size_bytes)
    return entries


def _entry(name: str, fields: object, path: Path, data_start: int, stamp: FileStamp) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, Mapping):
        raise ModelFileError(f"{where} is not described by an object")
    shape = _counts(fields.get("shape"))
    if shape is None or len(shape) > MAX_DIMENSIONS:
        raise ModelFileError(f"{where} has shape {_brief(fields.get('shape'))}, a list of sizes was expected")
    offsets = _counts(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2:
        raise ModelFileError(
            f"{where} has data_offsets {_brief(fields.get('data_offsets'))}, a pair of byte offsets was expected"
        )
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _KINDS:
        if dtype in _OTHER_DTYPES:
            raise UnsupportedModelError(f"{where} has dtype {dtype}; {', '.join(_KINDS)} can be read")
        raise ModelFileError(f"{where} has dtype {_brief(dtype)}, which safetensors does not know")
    kind = _KINDS[dtype]
    num_bytes = prod(shape) * KIND_LAYOUTS[kind].block_bytes
    start, end = offsets
    if end - start != num_bytes:
        raise ModelFileError(
            f"{where} takes {end - start:,} B in the file, {num_bytes:,} B were expected",
            because=f"shape {list(shape)} of {dtype} is {num_bytes:,} B",
        )
    return TensorEntry(
        name=name,
        shape=shape,
        kind=kind,
        path=path,
        offset_bytes=data_start + start,
        num_bytes=num_bytes,
        stamp=stamp,
    )


def _check_coverage(entries: Mapping[str, TensorEntry], path: Path, data_start: int, size_bytes: int) -> None:
    """Tensors lie back to back and end where the file ends."""
    position = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset_bytes, entry.num_bytes)):
        if entry.offset_bytes != position:
            raise ModelFileError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.offset_bytes:,}, {position:,} was expected",
                because="tensors lie back to back without holes or overlaps",
            )
        position += entry.num_bytes
        if position > size_bytes:
            raise ModelFileError(
                f"{path}: tensor {entry.name!r} is cut off: it ends at byte {position:,}, the file has {size_bytes:,} B"
            )
    if position != size_bytes:
        raise ModelFileError(f"{path}: the file has {size_bytes:,} B, its tensors end at byte {position:,}")


def _counts(value: object) -> tuple[int, ...] | None:
    """Return a JSON list of sizes; `None` for anything else."""
    is_counts = isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_SIZE for item in value)
    return tuple(value) if isinstance(value, list) and is_counts else None


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
