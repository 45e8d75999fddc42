"""A small HTTP/1.1 client for asyncio that reads an answer while it is still being written.

    async with open_stream("POST", url, headers={...}, body=b"...", timeout_s=60) as answer:
        async for line in answer.lines(): ...

The standard library has no asynchronous client, and a thread per request would measure the threads. One connection a
request, plain or TLS, answers with a length, in chunks, or up to the end of the connection; no proxies, no redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.errors import InvalidParameterError

MAX_LINE_BYTES = 16 * 1024 * 1024
"""A line of a stream: an event with log-probabilities can be long, one without end is refused."""
MAX_HEADERS = 100


class StreamBrokenError(Exception):
    """The connection ended, or said something that is not HTTP, before the answer was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go."""

    host: str
    port: int
    is_tls: bool
    path: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def parse_url(url: str, *, param: str = "--base-url") -> Endpoint:
    """Read an http or https address.

    Raises:
        InvalidParameterError: it is not one.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidParameterError(
            f"{url!r} is not an http address",
            param=param,
            hints=(f"write for example `{f'{param} ' if param.startswith('-') else ''}http://127.0.0.1:8000/v1`",),
        )
    is_tls = parts.scheme == "https"
    return Endpoint(
        host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, path=parts.path.rstrip("/")
    )


def bearer(api_key: str | None, *, param: str = "--api-key") -> dict[str, str]:
    """Return the header that a key is sent in; none for no key.

    Raises:
        InvalidParameterError: a key that no header can hold, so that it cannot be anybody's.
    """
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise InvalidParameterError("a key is printable ASCII without spaces", param=param)
    return {"Authorization": f"Bearer {api_key}"}


class StreamedAnswer:
    """Status and body of an answer; the body can be read once."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self._parts()])

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines of the body without their ends, each as soon as it has come."""
        rest = b""
        async for part in self._parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace").rstrip("\r")
            if len(rest) > MAX_LINE_BYTES:
                raise StreamBrokenError(f"a line of more than {MAX_LINE_BYTES:,} bytes")
        if rest:
            yield rest.decode("utf-8", "replace")

    async def _parts(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _chunk_size(await _read_line(self._reader)):
                yield await self._reader.readexactly(size)
                await _read_line(self._reader)
        elif "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left:
                part = await self._reader.read(min(left, 65536))
                if not part:
                    raise StreamBrokenError(f"the connection ended {left:,} bytes too early")
                left -= len(part)
                yield part
        else:
            while part := await self._reader.read(65536):
                yield part


@contextlib.asynccontextmanager
async def open_stream(
    method: str, endpoint: Endpoint, path: str, *, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[StreamedAnswer]:
    """Send a request, wait for the head of its answer, and close the connection at the end.

    Args:
        path: Below the endpoint's own path, with a slash.

    Raises:
        OSError: no connection.
        StreamBrokenError: the answer is cut short or not HTTP; while it is read, too.
    """
    context = ssl.create_default_context() if endpoint.is_tls else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=MAX_LINE_BYTES)
    try:
        head = {
            "Host": endpoint.host_header,
            "Connection": "close",
            "Content-Length": str(len(body)),
            "Accept": "*/*",
            **headers,
        }
        lines = [f"{method} {endpoint.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()
        try:
            yield await _read_head(reader)
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise StreamBrokenError("the connection ended before the answer did") from error
    finally:
        writer.close()
        # A peer that has gone already is no news; nothing more is expected of it.
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> StreamedAnswer:
    words = (await _read_line(reader)).split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise StreamBrokenError("the answer is not HTTP")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await _read_line(reader)
        if not line:
            return StreamedAnswer(reader, int(words[1]), headers)
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise StreamBrokenError(f"more than {MAX_HEADERS} headers")


async def _read_line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise StreamBrokenError("the connection ended before the answer did")
    return line.decode("latin-1").rstrip("\r\n")


def _chunk_size(line: str) -> int:
    return int(line.partition(";")[0].strip(), 16)
