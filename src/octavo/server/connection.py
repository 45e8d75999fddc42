"""Connection: uvicorn's HTTP/1.1, with an end to waiting for headers.

uvicorn waits for ever for the head of a request that has begun, or that never does: some hundred such connections,
which cost a client nothing, would use up what a process may have open, and nobody else could come in.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 60.0


class Connection(H11Protocol):
    """Closed if the whole head of a request is not there a minute after it began, the first one after connecting."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
