"""Writes docs/cli.md from the commands themselves; a test fails when the file is behind. Run with `make docs`."""

from __future__ import annotations

from pathlib import Path

import click

from octavo.cli.main import octavo
from octavo.config.engine import OPTIONS
from octavo.config.option import Option
from octavo.server.settings import SERVER_OPTIONS

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
WIDTH = 100

HEAD = """\
# Command line

<!-- Made by `make docs` from the commands themselves; edit those, not this file. -->

stdout is data, stderr is everything else. Every command takes `--json` and then writes one document to stdout, with a
`schema` field; an error is one too (`octavo.error/1`: `error.code`, `error.message`, `error.hints`).

| exit code | meaning |
| ---: | --- |
| 0 | done |
| 1 | failed |
| 2 | usage: an option or argument is wrong |
| 3 | it does not fit into memory; the message names what would |
| 130 | interrupted |

MODEL is an alias (`smollm2-135m`), a folder with safetensors, a .gguf file, or a hub id (`org/name`,
`org/name@revision`).
"""

TABLE_HEAD = """\
## Engine options

The same on every command that runs or plans an engine, in Python (`LLM(model, max_model_len=4096)`), and in the
environment. A flag wins over the environment, the environment over the default; `octavo doctor --config` prints each
value and where it came from. Sizes need a unit (`4GiB`, `500MB`); counts may use `k` (1024). An empty variable counts
as unset, and so does `None` in Python.

| option | environment | also understood | unit | default |
| --- | --- | --- | --- | --- |
"""

SERVER_HEAD = """\

## Server options

Of `octavo serve`, beside the engine's. `OCTAVO_CONFIG` or `--config` names a TOML file, in which options of both kinds
stand under their names (`max-model-len = 4096`); it loses against variables and flags. A list in one variable is
separated by commas. Values that begin with `tcp://`, as orchestrators make them for a service called octavo, say
nothing.

| option | environment | also understood | unit | default |
| --- | --- | --- | --- | --- |
"""

ENVIRONMENT = """
## Other variables

| variable | meaning |
| --- | --- |
| `OCTAVO_CACHE` | folder of downloaded models; else `XDG_CACHE_HOME/octavo`, else `~/.cache/octavo` |
| `PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`, `PIP_NO_INDEX`, `PIP_CERT`, `PIP_CLIENT_CERT`, \
`PIP_PROXY`, `PIP_TRUSTED_HOST`, `PIP_TIMEOUT`, `PIP_CONFIG_FILE` | where aliases are fetched from, as pip.conf says |
| `http_proxy`, `https_proxy`, `no_proxy`, `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`, `NETRC` | as other tools read them |
| `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` | where hub ids are fetched from |
| `HF_HUB_ETAG_TIMEOUT` | seconds that the hub may take to answer (5) |
| `NO_COLOR` | no colour |
"""


def cli_docs() -> str:
    """Return the text of docs/cli.md."""
    rows = "\n".join(_row(option) for option in OPTIONS)
    server_rows = "\n".join(_row(option) for option in SERVER_OPTIONS)
    tables = TABLE_HEAD + rows + "\n" + SERVER_HEAD + server_rows + "\n" + ENVIRONMENT
    return "\n".join([HEAD, *_help_of(octavo, "octavo", None), tables])


def _help_of(command: click.Command, name: str, parent: click.Context | None) -> list[str]:
    """Return the help of a command, and of the commands in it."""
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    parts = [f"## {context.command_path}\n\n```text\n{text}\n```\n"]
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            parts += _help_of(inner, each, context)
    return parts


def _row(option: Option) -> str:
    spelling = option.name.upper() if option.is_positional else f"--{option.flag_name}"
    names = {option.name, *option.aliases} - {option.flag_name.replace("-", "_")}
    also = ", ".join(f"`--{name.replace('_', '-')}`" for name in sorted(names))
    default = option.auto or f"`{option.show(option.default)}`"
    return f"| `{spelling}` | `{option.env}` | {also} | {option.unit} | {default} |"


if __name__ == "__main__":
    DOCS.write_text(cli_docs(), encoding="utf-8")
