"""EventFile: the engine's event stream as JSON lines, to look at or replay later. No text and no token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from octavo.core.events import Event, event_to_dict
from octavo.errors import MachineError

SCHEMA = "octavo.events/1"


class EventFile:
    """Writes events as they come. The first line says what the engine was: schema, allocator, blocks, block size.

    Opened before a model is loaded, so that a path that cannot be written costs no wait.

    Raises:
        MachineError: from any method: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._cannot_write(error) from error

    def begin(self, **header: object) -> None:
        self._write([{"schema": SCHEMA, **header}])

    def take(self, events: Sequence[Event]) -> None:
        self._write([event_to_dict(event) for event in events])

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _write(self, documents: Sequence[dict[str, object]]) -> None:
        try:
            self._file.writelines(json.dumps(document) + "\n" for document in documents)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> MachineError:
        return MachineError(f"{self._path}: cannot be written", because=str(error.strerror))
