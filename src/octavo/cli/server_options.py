"""Options of the server on the command line, in the environment and in a file, made from the server's option table.

    @server_options
    def command(asked: AskedConfig, settings: ServerSettings) -> None: ...

A flag wins over a variable, a variable over the file of `--config`, the file over the default; for the engine's options
as for the server's.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.cli.options import Command, table_options
from octavo.config.config_file import read_config_file
from octavo.config.engine import OPTIONS
from octavo.config.option import Option
from octavo.config.sources import Source, ask, environment_source
from octavo.errors import InvalidParameterError
from octavo.server.settings import SERVER_OPTIONS, ServerSettings

CONFIG_FILE = Option(
    name="config",
    kind="text",
    group="Server",
    help="TOML file with options, named as here: max-model-len = 4096",
    auto="none",
)
_BY_NAME = {each.name: each for each in (*SERVER_OPTIONS, CONFIG_FILE)}
_SERVICE_LINK = "tcp://"
"""How orchestrators fill the variables that they make for a service called octavo, `OCTAVO_PORT` among them."""


def server_options(function: Command) -> Command:
    """Add MODEL, every engine option and every server option."""
    return table_options((*OPTIONS, CONFIG_FILE, *SERVER_OPTIONS), _read)(function)


def _read(flags: Source) -> Mapping[str, Any]:
    environ = {name: value for name, value in os.environ.items() if not value.startswith(_SERVICE_LINK)}
    sources = [flags, _environment(environ)]
    config = _speaker(sources, CONFIG_FILE)
    engine_environ = {name: value for name, value in environ.items() if name not in _env_names()}
    weaker = []
    if config is not None:
        path = Path(CONFIG_FILE.read(config[0], param=config[1]))
        weaker.append(read_config_file(path, (*OPTIONS, *SERVER_OPTIONS)))
    engine = [_only(flags, is_server=False), environment_source(engine_environ)]
    engine += [_only(each, is_server=False) for each in weaker]
    return {"asked": ask(*engine), "settings": _settings([*sources, *weaker])}


def _environment(environ: Mapping[str, str]) -> Source:
    """Return what `OCTAVO_*` variables say about the server; an empty one counts as unset.

    Raises:
        InvalidParameterError: a variable that looks like a misspelt option.
    """
    named = {each.name: each.env for each in _BY_NAME.values() if environ.get(each.env)}
    known = {*_env_names(), *(each.env for each in OPTIONS)}
    for name in sorted(environ):
        if name.startswith("OCTAVO_") and name not in known:
            close = difflib.get_close_matches(name, _env_names(), n=1, cutoff=0.85)
            if close:
                raise InvalidParameterError(
                    "there is no such option", param=name, hints=(f"did you mean {close[0]}?", f"or unset {name}")
                )
    return Source(name="environment", values={key: environ[env] for key, env in named.items()}, spellings=named)


def _env_names() -> Sequence[str]:
    return [each.env for each in _BY_NAME.values()]


def _only(source: Source, *, is_server: bool) -> Source:
    """Return what a source says to one of the two tables."""
    values = {name: value for name, value in source.values.items() if (name in _BY_NAME) == is_server}
    return Source(name=source.name, values=values, spellings=source.spellings)


def _speaker(sources: Sequence[Source], option: Option) -> tuple[object, str] | None:
    for source in sources:
        if source.values.get(option.name) is not None:
            return source.values[option.name], source.spellings.get(option.name, option.name)
    return None


def _settings(sources: Sequence[Source]) -> ServerSettings:
    values = {}
    for option in SERVER_OPTIONS:
        said = _speaker(sources, option)
        if said is not None:
            values[option.name] = option.read(said[0], param=said[1])
    return ServerSettings(**values)
