"""TensorEntry: where one tensor lies in a file. The table of contents of a model, without its bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from octavo.models.tensor_kinds import TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """What tells whether a file is still the one whose header was read."""

    size_bytes: int
    modified_ns: int

    @staticmethod
    def of(descriptor: int) -> FileStamp:
        status = os.fstat(descriptor)
        return FileStamp(size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a model file.

    Args:
        name: As the file spells it.
        shape: Rows first, e.g. `[out_features, in_features]`; values of a row lie side by side.
        kind: Element type, a key of `KIND_LAYOUTS`.
        offset_bytes: From the start of the file.
        stamp: Of the file when its header was read.
        interleaved_heads: If not 0, the rows of each of so many heads are stored in interleaved rotary order
            (0, d/2, 1, d/2 + 1, ...) and must be put back when read.
        is_transposed: The file keeps the matrix with rows and columns exchanged; `shape` is ours.
        adds_one: The file keeps the values less 1 (Gemma's norms); they are read as float32 with 1 added.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    path: Path
    offset_bytes: int
    num_bytes: int
    stamp: FileStamp
    interleaved_heads: int = 0
    is_transposed: bool = False
    adds_one: bool = False

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows of the matrix; a vector is one row."""
        return prod(self.shape[:-1])
