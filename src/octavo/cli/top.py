"""`octavo top`: the pool of a running server, its requests and the last minute, in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import click

from octavo.cli.command import OctavoCommand
from octavo.cli.options import GroupedOption, Output, output_options
from octavo.errors import MachineError

DEFAULT_URL = "http://127.0.0.1:8000"
ANSWER_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 30.0
"""A server says something every ten seconds, whatever its engine does."""


@click.command(
    "top",
    cls=OctavoCommand,
    examples=("octavo top", "octavo top http://127.0.0.1:8000 --once", "octavo top --once --json"),
)
@click.argument("url", default=DEFAULT_URL, metavar="[URL]")
@click.option("--api-key", "api_key", cls=GroupedOption, group="Server", envvar="OCTAVO_API_KEY", metavar="KEY",
              help="Sent as a bearer token  [environment: OCTAVO_API_KEY]")  # fmt: skip
@click.option("--once", "is_once", cls=GroupedOption, group="Output", is_flag=True, help="Show one moment and end")
@output_options
def command(url: str, api_key: str | None, is_once: bool, output: Output) -> None:
    """Show the KV pool of a running server, its requests and the last minute.

    URL is where the server is, http://127.0.0.1:8000 unless given. The same picture as the server's page, until
    Ctrl-C. With --json, each moment is a document of the form octavo.kv/1, one a line; the same as `GET /kv`.
    """
    asyncio.run(_follow(url, api_key, is_once=is_once, output=output))


async def _follow(url: str, api_key: str | None, *, is_once: bool, output: Output) -> None:
    from rich.console import Console
    from rich.live import Live

    from octavo.cli.live_document import read_live
    from octavo.cli.top_view import draw

    console = Console(highlight=False)
    is_drawn = not output.is_json and not is_once and console.is_terminal
    async with contextlib.AsyncExitStack() as stack:
        documents = await stack.enter_async_context(contextlib.aclosing(_documents(url, api_key)))
        screen = stack.enter_context(Live(console=console, screen=True, auto_refresh=False)) if is_drawn else None
        async for document in documents:
            if output.is_json:
                click.echo(json.dumps(document))
            elif screen is not None:
                screen.update(draw(read_live(document), width=console.width, height=console.height), refresh=True)
            else:
                console.print(draw(read_live(document), width=min(console.width, 120)))
            if is_once:
                return
    raise MachineError("the server has ended the stream", because="it stops, or drains with nothing left to do")


async def _documents(url: str, api_key: str | None) -> AsyncGenerator[Any, None]:
    """Yield what the server's live stream says.

    Raises:
        MachineError: no server, no key, no stream, or one that breaks off or falls silent.
    """
    from octavo.llm.http_stream import StreamBrokenError, bearer, open_stream, parse_url

    endpoint = parse_url(url, param="URL")
    # As clients are given it: the API's address is often all that one has at hand.
    endpoint = replace(endpoint, path=endpoint.path.removesuffix("/v1"))
    host = endpoint.host_header
    headers = bearer(api_key)
    is_open = False
    try:
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await stack.enter_async_context(open_stream("GET", endpoint, "/live", headers=headers))
                if answer.status != 200:
                    raise _refusal(answer.status, await answer.read(), host)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise _no_server(host, "what answers there has no live stream")
            is_open = True
            async for document in _read_events(answer.lines(), host):
                yield document
    except TimeoutError as error:
        because = f"nothing came for {SILENCE_TIMEOUT_S if is_open else ANSWER_TIMEOUT_S:g} s"
        raise MachineError(
            f"{host} has fallen silent" if is_open else f"{host} does not answer", because=because
        ) from error
    except (OSError, StreamBrokenError, ValueError) as error:
        if not is_open:
            raise _no_server(host, str(error)) from error
        raise MachineError(f"the connection to {host} broke off", because=str(error)) from error


async def _read_events(lines: AsyncIterator[str], host: str) -> AsyncGenerator[Any, None]:
    """Yield the documents of a stream.

    Raises:
        TimeoutError: nothing has come for long; a server that has nothing to show says so.
    """
    is_frame = False
    while True:
        async with asyncio.timeout(SILENCE_TIMEOUT_S):
            line = await anext(lines, None)
        if line is None:
            return
        if line.startswith("event:"):
            is_frame = line[6:].strip() == "kv"
        elif line.startswith("data:") and is_frame:
            try:
                document = json.loads(line[5:])
            except (ValueError, RecursionError) as error:
                raise MachineError(f"what {host} sends cannot be read", because=f"{error}") from error
            yield document


def _no_server(host: str, because: str) -> MachineError:
    hints = (f"`octavo serve` starts one at {DEFAULT_URL}",)
    return MachineError(f"no octavo server at {host}", because=because, hints=hints)


def _refusal(status: int, body: bytes, host: str) -> MachineError:
    try:
        words = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        words = "that is no octavo server" if status == 404 else ""
    hints = ("give the server's key with `--api-key` or OCTAVO_API_KEY",) if status == 401 else ()
    return MachineError(f"{host} answers {status}", because=words, hints=hints)
