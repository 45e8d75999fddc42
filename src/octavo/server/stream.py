"""EventStream: a response of server-sent events that always ends with a word, and never falls silent for long.

data: {...}                 each event
: waiting                   a comment after `keep_alive_s` of silence; clients skip it, proxies see traffic
data: {"error": {...}}      what went wrong after the stream had begun; then the stream ends, without [DONE]
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.answers import until_gone
from octavo.server.errors import to_api_error
from octavo.server.json_body import dump_json

DONE = "data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"
_LOG = logging.getLogger(__name__)


def event(data: Any) -> str:
    """Write a value as one event."""
    return f"data: {dump_json(data)}\n\n"


class EventStream(Response):
    """Sends what a generator yields, and closes the generator when the client has gone.

    Args:
        events: Yields whole events, one or more at a time.
        keep_alive_s: Silence after which a comment is sent; 0 sends none.
        on_end: Called at the end, however it comes: a client may have gone before the generator has begun.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], *, keep_alive_s: float, on_end: Callable[[], None]) -> None:
        self._events = events
        self._keep_alive_s = keep_alive_s or None
        self._on_end = on_end
        self.status_code = 200
        self.background = None
        self.body = b""
        # The last one is nginx's: it would collect small pieces otherwise.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send, scope))
        leaving = asyncio.ensure_future(until_gone(Request(scope, receive)))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                scope["state"]["ended"] = "client gone"
        finally:
            for task in (sending, leaving):
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
            await self._events.aclose()
            self._on_end()

    async def _send_all(self, send: Send, scope: Scope) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        next_event: asyncio.Future[str] | None = None
        try:
            while True:
                next_event = next_event or asyncio.ensure_future(anext(self._events))
                done, _ = await asyncio.wait({next_event}, timeout=self._keep_alive_s)
                if not done:
                    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
                    continue
                try:
                    data = next_event.result()
                except StopAsyncIteration:
                    break
                except Exception as error:  # noqa: BLE001 - it is told to the client, and logged
                    data = self._explain(error, scope)
                    await send({"type": "http.response.body", "body": data.encode(), "more_body": True})
                    break
                next_event = None
                await send({"type": "http.response.body", "body": data.encode(), "more_body": True})
        finally:
            if next_event is not None:
                # Also if it is done, and failed or at the end just as the client left: nobody else looks at it.
                next_event.cancel()
                with contextlib.suppress(BaseException):
                    await next_event
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    def _explain(error: Exception, scope: Scope) -> str:
        answered = to_api_error(error)
        scope["state"]["ended"] = answered.code
        if answered.status_code == 500:
            _LOG.error("A stream failed: %s", type(error).__name__, exc_info=error)
        return event(answered.body())
