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

    Raises:
        MachineError: the file cannot be written.
    """

    def __init__(self, path: Path, **header: object) -> None:
        try:
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise MachineError(f"{path}: cannot be written", because=str(error.strerror)) from error
        self._write({"schema": SCHEMA, **header})

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._write(event_to_dict(event))

    def close(self) -> None:
        self._file.close()

    def _write(self, document: dict[str, object]) -> None:
        self._file.write(json.dumps(document) + "\n")
