"""Door: who may come in, and with how much. Before any route sees a request.

Host         a name that is meant for this server, or a page elsewhere could reach it by rebinding its own name
key          a bearer token on everything but /health and the page's own files, compared in constant time
body         application/json for POST, so that a form of another page cannot send it; bounded in size and time
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config.text_file import read_text_file
from octavo.errors import InvalidParameterError
from octavo.server.errors import ApiError
from octavo.server.json_body import json_response
from octavo.server.settings import MAX_HEADER_BYTES, ServerSettings

BODY_TIMEOUT_S = 60.0
MAX_OPEN_BODIES = 64
"""Bodies of the largest size that the requests in progress may have together."""
MAX_KEYS = 1000
_MAX_KEY_FILE_BYTES = 1 << 20
_OPEN_PATHS = frozenset({"/health"})
_OPEN_PAGES = frozenset({"/", "/favicon.ico"})
"""The page's own files are the same everywhere; what it shows, it asks for with a key."""
_ENDLESS_PATHS = frozenset({"/live"})
_OPERATOR_PATHS = ("/kv", "/requests")


class Door:
    """Middleware that lets through what may pass."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, keys: Sequence[str]) -> None:
        self._app = app
        self._settings = settings
        self._keys = Keys(keys)
        self._operator = Keys([settings.operator_key] if settings.operator_key else [])
        self._hosts = _Hosts(settings)
        self._bodies = _Bodies(MAX_OPEN_BODIES * settings.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            scope["state"]["ended"] = error.code
            await json_response(error.body(), error.status_code, error.headers)(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] not in _ENDLESS_PATHS:
            scope = {**scope, "method": "GET"}  # whoever sends the answer leaves its body out
        with contextlib.closing(_Body(receive, self._settings.max_body_bytes, self._bodies)) as body:
            await self._app(scope, body.receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["state"].get("is_beyond_limit") and scope["path"] not in _OPEN_PATHS:
            raise ApiError(
                503,
                "too many connections are open (hint: keep fewer, or raise the server's --max-connections)",
                code="too-many-connections",
                headers={"Retry-After": "1", **_CLOSE},
            )
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise ApiError(431, f"the headers have more than {MAX_HEADER_BYTES:,} bytes", code="headers-too-large")
        headers = Headers(scope=scope)
        self._hosts.check(headers.get("host"))
        self._check_key(scope, headers)
        if scope["method"] == "POST":
            _check_content(headers)
        self._check_length(headers)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        if is_operator_path(path):
            if not self._settings.has_operator:
                raise ApiError(
                    403,
                    "the operator endpoints are closed (hint: start the server with --operator-key KEY"
                    " or --enable-operator)",
                    code="operator-closed",
                )
            if self._operator.are_asked_for:
                self._operator.check(headers)
                return
        if not self._keys.are_asked_for or _is_open(path):
            return
        key = self._operator.find(headers) or self._keys.check(headers)
        if self._keys.are_several and not self._settings.share_cache:
            # How fast an answer begins must not tell one tenant what another has asked.
            scope["state"]["tenant"] = hashlib.blake2b(key.encode(), digest_size=16, person=b"octavo-salt").hexdigest()

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)


class Keys:
    """Keys that open the door."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def are_asked_for(self) -> bool:
        return bool(self._keys)

    @property
    def are_several(self) -> bool:
        return len(self._keys) > 1

    def find(self, headers: Headers) -> str | None:
        """Return the key of a request, if it is one of these. Takes as long for one that nearly fits as for any."""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        given = sent.strip().encode("utf-8", errors="replace") if scheme.lower() == "bearer" else b""
        found = [key for key in self._keys if hmac.compare_digest(key, given)]
        return found[0].decode() if found else None

    def check(self, headers: Headers) -> str:
        """Return the key of a request.

        Raises:
            ApiError: 401, it has none of these.
        """
        key = self.find(headers)
        if key is None:
            has_one = "authorization" in headers
            raise ApiError(
                401,
                "the key is wrong" if has_one else "a key is needed: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return key


class _Hosts:
    """Names under which the server may be reached.

    An attacker's page can point its own name at this machine, but not a name that it does not own, and no IP address:
    so addresses pass, and names have to be known.
    """

    def __init__(self, settings: ServerSettings) -> None:
        names = ("localhost", socket.gethostname(), settings.host, *settings.allowed_host)
        self._names = {name.lower().rstrip(".") for name in names}
        self._takes_any = "*" in settings.allowed_host

    def check(self, host: str | None) -> None:
        # None can only be HTTP/1.0, which no browser speaks.
        if self._takes_any or host is None:
            return
        name = _without_port(host).lower().rstrip(".")
        if name in self._names or name.endswith(".localhost") or _is_address(name):
            return
        raise ApiError(
            403,
            "the server is not known under this name (hint: start it with --allowed-host NAME for each name it has)",
            code="host-not-allowed",
            param="Host",
        )


class _Bodies:
    """What all requests in progress have sent together: each body is held until its request has been answered."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class _Body:
    """A request's body, as long as it is neither too large nor too slow, and there is room for it."""

    def __init__(self, receive: Receive, max_bytes: int, bodies: _Bodies) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._bodies = bodies
        self._num_bytes = 0
        self._is_complete = False
        self._deadline_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"the body took more than {BODY_TIMEOUT_S:g} s", code="body-too-slow", headers=_CLOSE
            ) from None
        self._is_complete = not message.get("more_body", False)
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        if self._bodies.num_bytes > self._bodies.max_bytes:
            raise ApiError(
                429,
                f"requests with more than {self._bodies.max_bytes:,} bytes together are in progress",
                code="too-many-bytes",
                headers={"Retry-After": "1", **_CLOSE},
            )
        return message

    def close(self) -> None:
        """Give its room back."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0


_CLOSE = {"Connection": "close"}


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes:,} bytes (hint: the server's --max-body-bytes)"
    return ApiError(413, message, code="body-too-large", headers=_CLOSE)


def _check_content(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the header `Content-Type: application/json`", code="not-json", param="Content-Type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415, "compressed bodies are not read: leave out Content-Encoding", code="encoded", param="Content-Encoding"
        )


def is_operator_path(path: str) -> bool:
    """Whether a path is for operators only."""
    return any(path == each or path.startswith(f"{each}/") for each in _OPERATOR_PATHS)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path in _OPEN_PAGES or path.startswith("/static/")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def read_keys(settings: ServerSettings) -> tuple[str, ...]:
    """Return the keys of the settings and of their file.

    Raises:
        InvalidParameterError: a key that no header can hold, or a file without any.
        MachineError: the file cannot be read.
    """
    if settings.api_key_file is None:
        return settings.api_key
    text = read_text_file(
        Path(settings.api_key_file),
        param="api_key_file",
        what="a file of keys",
        max_bytes=_MAX_KEY_FILE_BYTES,
        encoding="utf-8-sig",
    )
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # An empty file must not open the door to all.
        raise InvalidParameterError(f"{settings.api_key_file} holds no key", param="api_key_file")
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidParameterError("a key is printable ASCII without spaces", param="api_key_file")
    return tuple(dict.fromkeys((*settings.api_key, *keys)))
