"""JSON objects and texts of model folders, read with limits: what is not as expected becomes a `ModelFileError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError
from octavo.models.header_reader import HeaderReader, open_model_file

MAX_JSON_BYTES = 256 * 1024**2


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ModelFileError: not UTF-8, not JSON, not an object, a name twice in an object, or too long.
    """
    with open_model_file(path) as file:
        reader = HeaderReader(file, path, max_bytes=MAX_JSON_BYTES)
        text = reader.take(reader.size_bytes, "the file")
    return parse_json(text, str(path))


def read_model_text(path: Path) -> str:
    """Read a file of plain text.

    Raises:
        ModelFileError: not UTF-8, or too long.
    """
    with open_model_file(path) as file:
        reader = HeaderReader(file, path, max_bytes=MAX_JSON_BYTES)
        data = reader.take(reader.size_bytes, "the file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8 text (byte {error.start:,})") from error


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object; `where` starts the error message."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{where}: not UTF-8 text (byte {error.start:,})") from error
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{where}: not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ModelFileError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:  # a name twice, or a number of thousands of digits
        raise ModelFileError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: a JSON object was expected, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a repeated name: which value counts would be a guess."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} appears twice in one object")
        result[name] = value
    return result
