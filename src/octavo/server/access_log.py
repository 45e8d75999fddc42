"""AccessLog: gives each request an id, turns what fails into an answer, and writes one line about each.

Paths, statuses and times only: no prompt, no answer, no query, no key.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import to_api_error
from octavo.server.json_body import json_response
from octavo.server.request_ids import check_client_id

ACCESS = logging.getLogger("octavo.access")
_LOG = logging.getLogger(__name__)
MAX_PATH_CHARS = 200
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines; told only when the answer is not well."""


class AccessLog:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"client_id": None, "request_id": secrets.token_hex(12), "tenant": None}
        status = 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        try:
            sent = Headers(scope=scope).get("x-request-id")
            if sent is not None:
                state["client_id"] = state["request_id"] = check_client_id(sent)
            await self._app(scope, receive, tell)
        except ClientDisconnect:
            state["ended"] = "client gone"
        except Exception as error:  # noqa: BLE001 - the last line of defence
            answered = to_api_error(error)
            state["ended"] = answered.code
            if answered.status_code == 500:
                _LOG.error("A request failed: %s", type(error).__name__, exc_info=error)
            if not status:
                await json_response(answered.body(), answered.status_code, answered.headers)(scope, receive, tell)
        finally:
            self._write(scope, status, time.perf_counter() - start_s)

    @staticmethod
    def _write(scope: Scope, status: int, duration_s: float) -> None:
        state = scope["state"]
        if status == 200 and scope["path"] in _QUIET_PATHS:
            return
        fields = {
            "method": scope["method"],
            "path": scope["path"][:MAX_PATH_CHARS],
            "status": status or 499,
            "duration_s": round(duration_s, 4),
            "request_id": state["request_id"],
        }
        if "ended" in state:
            fields["ended"] = state["ended"]
        ACCESS.info("request", extra={"fields": fields})
