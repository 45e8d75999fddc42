"""ConfigFile: options from a TOML file, one table per part of the program.

    [engine]                        # options of the engine, as in `octavo serve -h`
    model = "smollm2-135m"
    max-model-len = 4096
    kv-cache-memory = "2GiB"

    [serve]                         # options of the server
    port = 8000

Names are those of the flags, with `-` or `_`; other engines' spellings work as they do there. A file is the weakest
source after the defaults: flags and `OCTAVO_*` variables win. A table or name that nobody knows is an error, and so is
a name outside a table, since it would be anybody's guess whom it is for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.engine import OPTIONS, find_option
from octavo.config.option import did_you_mean
from octavo.config.sources import Source
from octavo.errors import InvalidParameterError, MachineError

ENGINE = "engine"
MAX_FILE_BYTES = 2**20
"""A config is a page of text; more than this is some other file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config file that could be read; its tables are checked as they are asked for.

    Args:
        path: Named in errors.
        tables: Table name to its values as written.
    """

    path: Path
    tables: Mapping[str, Mapping[str, Any]]

    def engine_source(self) -> Source:
        """Return what the file says about the engine.

        Raises:
            InvalidParameterError: an unknown name, or one option under two names.
        """
        values: dict[str, object] = {}
        spellings: dict[str, str] = {}
        for name, value in self.tables.get(ENGINE, {}).items():
            spelling = self._spell(ENGINE, name)
            option = find_option(name.replace("-", "_"))
            if option is None:
                raise self._unknown(spelling, name, [known for each in OPTIONS for known in (each.name, *each.aliases)])
            if option.name in values:
                raise InvalidParameterError(f"the same option as {spellings[option.name]}, given twice", param=spelling)
            # A bare number would be taken for bytes, as Python's are; a person may have meant GiB.
            values[option.name] = str(value) if option.kind == "bytes" and type(value) is int else value
            spellings[option.name] = spelling
        return Source(name="file", values=values, spellings=spellings)

    def table(self, table: str, known: Sequence[str]) -> dict[str, Any]:
        """Return another table, its names with `_`; their values are the caller's to check.

        Raises:
            InvalidParameterError: a name that is not in `known`, or one name given in both spellings.
        """
        values: dict[str, Any] = {}
        for name, value in self.tables.get(table, {}).items():
            plain = name.replace("-", "_")
            spelling = self._spell(table, name)
            if plain not in known:
                raise self._unknown(spelling, name, known)
            if plain in values:
                raise InvalidParameterError("given twice, with - and with _", param=spelling)
            values[plain] = value
        return values

    def spelling(self, table: str, name: str) -> str:
        """Return how the file spells one of a table's names, for errors about its value."""
        written = self.tables.get(table, {})
        return self._spell(table, name if name in written else name.replace("_", "-"))

    def _spell(self, table: str, name: str) -> str:
        return f"{self.path.name}: {table}.{name}"

    def _unknown(self, spelling: str, name: str, known: Sequence[str]) -> InvalidParameterError:
        hyphenated = tuple(each.replace("_", "-") for each in known)
        return InvalidParameterError(
            "there is no such option", param=spelling, hints=did_you_mean(name.replace("_", "-"), hyphenated)
        )


def read_config_file(path: Path, *, tables: Sequence[str] = (ENGINE,)) -> ConfigFile:
    """Read a TOML file.

    Args:
        tables: The tables that it may have.

    Raises:
        MachineError: it cannot be read.
        InvalidParameterError: it is not TOML, or has a table or a name outside tables that nobody knows.
    """
    written = _parse(path)
    for name, value in written.items():
        spelling = f"{path.name}: {name}"
        if name in tables and isinstance(value, dict):
            continue
        if name in tables:
            raise InvalidParameterError("this is a table, not a value", param=spelling, hints=(f"write [{name}]",))
        if isinstance(value, dict):
            hints = did_you_mean(name, tuple(tables)) or (f"there are {', '.join(f'[{each}]' for each in tables)}",)
            raise InvalidParameterError("there is no such table", param=spelling, hints=hints)
        raise InvalidParameterError(
            "it stands outside every table",
            param=spelling,
            hints=(f"put it below [{ENGINE}]",) if find_option(name.replace("-", "_")) else _list_tables(tables),
        )
    return ConfigFile(path=path, tables=written)


def _list_tables(tables: Sequence[str]) -> tuple[str, ...]:
    return (f"put it below one of {', '.join(f'[{each}]' for each in tables)}",)


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MachineError(f"{path}: cannot be read", because=str(error.strerror)) from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidParameterError("more than 1 MiB is not a config", param=path.name)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidParameterError("this is not UTF-8 text", param=path.name) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidParameterError("this is not TOML", param=path.name, because=str(error)) from error
