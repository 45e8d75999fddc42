"""Ids of requests: what a client calls its request, and what the engine calls it."""

from __future__ import annotations

import secrets
from collections import OrderedDict

from octavo.server.errors import ApiError

MAX_ID_CHARS = 128


def check_client_id(value: str) -> str:
    """Return an id that a client sent, if it can be sent back and logged as it is.

    Raises:
        ApiError: 400.
    """
    if not 0 < len(value) <= MAX_ID_CHARS or not value.isascii() or not value.isprintable() or " " in value:
        raise ApiError(
            400,
            f"X-Request-Id: up to {MAX_ID_CHARS} printable ASCII characters without spaces are taken",
            code="invalid-parameter",
            param="X-Request-Id",
        )
    return value


def engine_id(kind: str, client_id: str | None) -> str:
    """Return an id for the engine, unique also where two clients chose the same one."""
    return f"{kind}-{client_id}-{secrets.token_hex(4)}" if client_id else f"{kind}-{secrets.token_hex(12)}"


class ClientIds:
    """What the engine calls the requests that clients named; the last thousand of them."""

    def __init__(self, max_kept: int = 1000) -> None:
        self._max_kept = max_kept
        self._by_client: OrderedDict[str, str] = OrderedDict()

    def note(self, client_id: str | None, request_id: str) -> None:
        if client_id is None:
            return
        self._by_client[client_id] = request_id
        self._by_client.move_to_end(client_id)
        if len(self._by_client) > self._max_kept:
            self._by_client.popitem(last=False)

    def find(self, client_id: str) -> str:
        """Return the engine's id; where none is known, the client's."""
        return self._by_client.get(client_id, client_id)
