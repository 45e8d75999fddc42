"""`octavo serve`: serve a model over HTTP."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import Output, output_options
from octavo.cli.server_options import server_options
from octavo.config.sources import AskedConfig
from octavo.errors import MachineError
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.llm.async_llm import AsyncLLM


@click.command(
    "serve",
    cls=OctavoCommand,
    examples=(
        "octavo serve",
        "octavo serve ./model.gguf --port 9000 --kv-cache-memory 2GiB --max-model-len 4k",
        "OCTAVO_API_KEY=secret octavo serve --host 0.0.0.0 --allowed-host llm.example.org",
        "octavo serve --config octavo.toml --log-format json",
    ),
)
@server_options
@output_options
def command(asked: AskedConfig, settings: ServerSettings, output: Output) -> None:
    """Serve a model over HTTP, for OpenAI's clients and the ones made like them.

    The socket answers at once; /ready says 503 until the model is loaded. SIGTERM or Ctrl-C lets running answers end
    first, a second one does not. With `--json`, one document on stdout says the address once requests are taken.
    """
    try:
        from octavo.server.lifecycle import Lifecycle
        from octavo.server.log import start_log
    except ImportError as error:
        raise MachineError(
            f"the server's packages are not installed ({error})", hints=("pip install 'octavo[serve]'",)
        ) from error
    from octavo.cli.render import print_card, progress_bars
    from octavo.llm.async_llm import AsyncLLM

    start_log(settings.log_format, is_quiet=output.is_quiet)
    if not output.is_quiet:
        _warn_if_open(settings)

    def load() -> AsyncLLM:
        with progress_bars(output) as progress:
            return AsyncLLM(
                asked.config,
                max_waiting=settings.max_waiting,
                stall_s=settings.stall_timeout,
                progress=progress,
                on_card=None if output.is_quiet else print_card,
            )

    def on_listening(address: str) -> None:
        if not output.is_quiet:
            click.echo(f"listening on {address}, loading the model", err=True)

    def on_ready(llm: AsyncLLM, address: str) -> None:
        name = _served_names(llm, settings)[0]
        if not output.is_quiet:
            click.echo(f"ready on {address}\n{_curl(address, name, settings)}", err=True)
        # Last: a program that reads it finds all the rest said.
        if output.is_json:
            document = {
                "schema": "octavo.serve/1",
                "url": address,
                "models": list(_served_names(llm, settings)),
                "card": llm.card.as_dict(),
            }
            click.echo(json.dumps(document, ensure_ascii=False))

    lifecycle = Lifecycle(load, settings, on_listening=on_listening, on_ready=on_ready)
    code = lifecycle.run()
    if not output.is_quiet:
        click.echo("stopped", err=True)
    if lifecycle.has_threads_left:
        # They run in C++, and would be killed in the middle of it when the interpreter winds down, with a crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    click.get_current_context().exit(code)


def _served_names(llm: AsyncLLM, settings: ServerSettings) -> tuple[str, ...]:
    from octavo.server.service import served_name

    return settings.served_model_name or (served_name(llm.model_name),)


def _curl(address: str, name: str, settings: ServerSettings) -> str:
    """Return a command that works when it is pasted; a key is not shown, only where it goes."""
    has_key = settings.api_key or settings.api_key_file
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=True)
    quoted = body.replace("'", "'\\''")
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def _warn_if_open(settings: ServerSettings) -> None:
    is_local = settings.host in ("localhost", "::1") or settings.host.startswith("127.")
    if not is_local and not settings.api_key and settings.api_key_file is None:
        click.echo(f"warning: no --api-key: everyone who reaches {settings.host} may ask", err=True)
