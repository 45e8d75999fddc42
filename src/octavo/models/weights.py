"""Reads weights: one tensor at a time, into memory of its own.

Nothing is mapped and no file stays open: after loading, the model file may shrink, change or vanish without effect.
A runner takes a tensor, packs it for its kernels and lets it go, so that at most one tensor exists twice.

    with WeightSource(model) as source:
        for tensor in source.read_all(progress):
            pack(tensor.name, tensor.data, tensor.kind)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from octavo.errors import MachineError, ModelFileError
from octavo.models.load import OpenedModel
from octavo.models.tensor_entry import FileStamp, TensorEntry
from octavo.models.tensor_kinds import KIND_LAYOUTS, TensorKind
from octavo.models.weights_decode import decode_f32

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read in all."""

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """One tensor in memory, as stored.

    Args:
        name: Our name.
        shape: Rows first; a vector has one entry.
        kind: Element type.
        data: `[rows, row_bytes]`, uint8, owned, C order; a vector is one row.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    data: npt.NDArray[np.uint8]

    def to_f32(self) -> npt.NDArray[np.float32]:
        """Return the values as a new float32 array of `shape`; exact for float kinds."""
        return decode_f32(self.data, self.kind, self.shape[-1]).reshape(self.shape)


class WeightSource:
    """Reads tensors by our names. Used as a context manager; closing it closes the files.

    Args:
        model: As opened; what lies where is taken from it.
    """

    __slots__ = ("_descriptors", "_spare_head", "_tensors")

    def __init__(self, model: OpenedModel) -> None:
        self._tensors = dict(model.tensors)
        self._spare_head = model.spare_head
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._tensors.values())

    def kind(self, name: str) -> TensorKind:
        """Return a tensor's stored element type without reading it."""
        return self._tensors[name].kind

    def read(self, name: str, progress: Callable[[int], None] | None = None) -> Tensor:
        """Read one tensor.

        Args:
            progress: Called with the bytes of each chunk read.

        Raises:
            ModelFileError: the file changed since it was opened, or ends early.
            MachineError: it may not be read, or the disk failed.
        """
        entry = self._tensors[name]
        data = np.empty(entry.num_bytes, dtype=np.uint8)
        self._fill(entry, data.data, progress)
        if entry.is_transposed:
            data = _turn(data, entry)
        rows = data.reshape(entry.num_rows, -1) if entry.num_bytes else data.reshape(entry.num_rows, 0)
        tensor = Tensor(name=name, shape=entry.shape, kind=entry.kind, data=_restore_row_order(rows, entry))
        return _with_one_added(tensor) if entry.adds_one else tensor

    def read_all(self, progress: Progress | None = None) -> Iterator[Tensor]:
        """Read every tensor, in the order they lie in their files.

        A head that a tied model's file holds besides the embedding is compared with it first, and left out.

        Raises:
            ModelFileError: as `read`; or that head differs from the embedding.
        """
        done, total = 0, self.num_bytes

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total)

        if self._spare_head is not None:
            self._check_spare_head(self._tensors["embed"], self._spare_head)
        order = sorted(self._tensors, key=lambda name: (self._tensors[name].path, self._tensors[name].offset_bytes))
        for name in order:
            yield self.read(name, advance)

    def close(self) -> None:
        """Close the files; harmless when already closed."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _check_spare_head(self, embed: TensorEntry, head: TensorEntry) -> None:
        """Which of two different heads is meant would be a guess."""
        is_same = (embed.shape, embed.kind) == (head.shape, head.kind)
        for start in range(0, embed.num_bytes if is_same else 0, _CHUNK_BYTES):
            parts = []
            for entry in (embed, head):
                part = np.empty(min(_CHUNK_BYTES, entry.num_bytes - start), dtype=np.uint8)
                self._fill(entry, part.data, None, start=start)
                parts.append(part)
            is_same = is_same and np.array_equal(parts[0], parts[1])
        if not is_same:
            raise ModelFileError(
                f"{head.path}: tensor {head.name!r} differs from the embedding, but the configuration ties them",
                hints=('set "tie_word_embeddings": false in config.json if the head is meant to be its own',),
            )

    def _fill(
        self, entry: TensorEntry, target: memoryview, progress: Callable[[int], None] | None, *, start: int = 0
    ) -> None:
        """Read the bytes of a tensor from `start` on until `target` is full."""
        descriptor = self._descriptor(entry)
        done = 0
        while done < len(target):
            try:
                count = os.preadv(descriptor, [target[done : done + _CHUNK_BYTES]], entry.offset_bytes + start + done)
            except OSError as error:
                raise MachineError(f"{entry.path}: reading {entry.name!r} failed: {error.strerror}") from error
            if count == 0:
                raise ModelFileError(f"{entry.path}: tensor {entry.name!r} is cut off: {done:,} of {len(target):,} B")
            done += count
            if progress is not None:
                progress(count)
        if FileStamp.of(descriptor) != entry.stamp:
            raise _changed(entry)

    def _descriptor(self, entry: TensorEntry) -> int:
        if entry.path not in self._descriptors:
            try:
                self._descriptors[entry.path] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise MachineError(f"{entry.path}: cannot be read: {error.strerror}") from error
        return self._descriptors[entry.path]


def _restore_row_order(rows: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """Undo the interleaving of rotary pairs.

    A head of width d is stored as rows 0, d/2, 1, d/2 + 1, ...; the result has them as 0, 1, 2, ... Whole rows move,
    so quantised ones stay as they are. A bias is one row whose single values move.
    """
    if not entry.interleaved_heads:
        return rows
    item_bytes = rows.shape[1] if len(entry.shape) == 2 else KIND_LAYOUTS[entry.kind].block_bytes
    pairs = rows.reshape(entry.interleaved_heads, -1, 2, item_bytes)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _turn(data: npt.NDArray[np.uint8], entry: TensorEntry) -> npt.NDArray[np.uint8]:
    """Exchange rows and columns of a float matrix."""
    layout = KIND_LAYOUTS[entry.kind]
    assert layout.block_size == 1, "values of a quantised row cannot move"
    num_rows, num_columns = entry.shape
    turned = data.reshape(num_columns, num_rows, layout.block_bytes).swapaxes(0, 1)
    return np.ascontiguousarray(turned)


def _with_one_added(tensor: Tensor) -> Tensor:
    values = tensor.to_f32() + np.float32(1)
    return replace(tensor, kind="f32", data=values.view(np.uint8).reshape(1, -1))


def _changed(entry: TensorEntry) -> ModelFileError:
    return ModelFileError(f"{entry.path}: the file changed while the model was being loaded")
