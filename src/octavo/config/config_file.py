"""Options from a TOML file, named as their flags are, with `-` or `_`.

    model = "smollm2-135m"
    max-model-len = 4096
    kv-cache-memory = "2GiB"            # sizes carry their unit
    served-model-name = ["a", "b"]      # where a flag may be repeated

One flat list: all options have different names, so there is nothing that tables could tell apart. The file is the
weakest source before the defaults; flags and `OCTAVO_*` variables win. A name that nobody knows is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.config.option import Option, did_you_mean
from octavo.config.sources import Source
from octavo.config.text_file import read_text_file
from octavo.errors import InvalidParameterError

MAX_FILE_BYTES = 2**20
"""A config is a page of text; more than this is some other file."""


def read_config_file(path: Path, options: Sequence[Option]) -> Source:
    """Read a TOML file.

    Args:
        options: What it may name; other engines' spellings of them, too.

    Raises:
        MachineError: it cannot be read.
        InvalidParameterError: it is too long, not TOML, names something that is no option, or one option twice.
    """
    known = {name: option for option in options for name in (option.name, *option.aliases)}
    values: dict[str, object] = {}
    spellings: dict[str, str] = {}
    for name, value in _parse(path).items():
        spelling = f"{path.name}: {name}"
        option = known.get(name.replace("-", "_"))
        if isinstance(value, dict):
            raise InvalidParameterError(
                "options stand in no table", param=spelling, hints=(f"leave out the line [{name}]",)
            )
        if option is None:
            hyphenated = tuple(each.replace("_", "-") for each in known)
            raise InvalidParameterError(
                "there is no such option", param=spelling, hints=did_you_mean(name.replace("_", "-"), hyphenated)
            )
        if option.name in values:
            raise InvalidParameterError(f"the same option as {spellings[option.name]}, given twice", param=spelling)
        # A bare number would be taken for bytes, as Python's are; a person may have meant GiB.
        values[option.name] = str(value) if option.kind == "bytes" and type(value) is int else value
        spellings[option.name] = spelling
    return Source(name=path.name, values=values, spellings=spellings)


def _parse(path: Path) -> dict[str, Any]:
    text = read_text_file(path, param="config", what="a config", max_bytes=MAX_FILE_BYTES)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidParameterError("this is no TOML", param=path.name, because=str(error)) from error
