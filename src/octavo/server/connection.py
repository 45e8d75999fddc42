"""Connection: uvicorn's HTTP/1.1, with an end to every wait for a client, and errors of our own shape.

uvicorn waits for ever for the head of a request that has begun or that never does, for the rest of a body whose request
has been answered already, and for a client that reads nothing: some hundred such connections, which cost a client
nothing, would use up what a process may have open, and nobody else could come in.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import sys
import termios
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from octavo.server.connection_limit import ConnectionLimit
from octavo.server.errors import ApiError
from octavo.server.json_body import dump_json

HEAD_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 60.0
"""Longest that a client may take nothing of what waits for it, once the system's own buffers are full."""
MAX_EARLY_BYTES = 64 * 1024
"""What a client may send of its next requests before the one that it waits for has been answered."""
BEYOND_TIMEOUT_S = 5.0
"""HEAD_TIMEOUT_S for those who are told that there are too many connections."""


class Connection(H11Protocol):
    """Closed if the whole head of a request is not there a minute after it began, the first one after connecting; and
    if its client reads nothing for a minute.

    Args:
        limit: Shared by all connections of a server.
    """  # noqa: D205 - one sentence

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limit: ConnectionLimit,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limit = limit
        self._is_beyond = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    # ---- called by the event loop ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._is_beyond = self._limit.is_beyond(len(self.connections))
        if self._is_beyond:
            self.app_state = {**self.app_state, "is_beyond_limit": True}  # `Door` answers
            if self._limit.is_far_beyond(len(self.connections)):
                transport.abort()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        self._limit.note_busy(self)
        super().data_received(data)
        self._watch_head()
        if (
            self._is_answering
            and self.conn.their_state is h11.DONE
            and len(self.conn.trailing_data[0]) < MAX_EARLY_BYTES
        ):
            self.flow.resume_reading()  # paused for what came too early; but only who reads sees a client leave
        if self._is_waiting:  # for the next request: what came was the rest of a body that had its answer before
            self._stop_watching_head()
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            self._limit.note_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.note_busy(self)
        super().connection_lost(exc)
        self._stop_watching_head()
        self._stop_watching_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_watching_reader()

    # ---- called by uvicorn ----

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_beyond and not self._is_answering:
            self.transport.close()
        if self.transport.is_closing():
            self._watch_reader()
        elif self._is_waiting:
            self._limit.note_idle(self)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        """Say that a request is no HTTP/1.1, unless another answer is under way."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # Called where the error is caught. Its own words may repeat what was sent.
            error = sys.exception()
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            message, code = _NO_HTTP.get(status, _NO_HTTP[400])
            self._send_error(ApiError(status, message, code=code))
        self._give_up()
        self._close()

    def shutdown(self) -> None:
        """Close if nothing is being answered; what has not been asked to its end is answered here."""
        if self._is_answering and self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            headers = {"Retry-After": "1"}
            self._send_error(
                ApiError(503, "the server stops, and the body was not there yet", code="stopping", headers=headers)
            )
            self._give_up()
            self._close()
        else:
            super().shutdown()

    def abort(self) -> None:
        """Close, whatever the client has not read yet."""
        self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: a request to speak something else is answered as if it had not asked, as it may be."""

    # ---- called by the limit ----

    def close_idle(self) -> None:
        """Make room for somebody else."""
        self._limit.note_busy(self)
        self.timeout_keep_alive_handler()

    # ---- inside ----

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_waiting(self) -> bool:
        """Whether everything asked so far has been answered, and nothing more has begun to come."""
        has_asked = self.cycle is not None and self.cycle.response_complete
        return (
            has_asked
            and self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
            and not self.transport.is_closing()
        )

    def _give_up(self) -> None:
        """Let whoever waits for more of a request go on."""
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _send_error(self, error: ApiError) -> None:
        body = dump_json(error.body()).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", secrets.token_hex(12).encode()),
            *((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()),
        ]
        response = h11.Response(
            status_code=error.status_code, headers=headers, reason=STATUS_PHRASES[error.status_code]
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _watch_head(self) -> None:
        """Give the client a time for the next head; what is left of a body that nobody reads has to come in it, too."""
        if self._is_answering or self.transport.is_closing():
            self._stop_watching_head()
        elif self._head_timer is None:
            timeout_s = BEYOND_TIMEOUT_S if self._is_beyond else HEAD_TIMEOUT_S
            self._head_timer = self.loop.call_later(timeout_s, self._close)

    def _stop_watching_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close(self) -> None:
        self.transport.close()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Give up a client that takes nothing of what waits for it; nothing is added to that meanwhile."""
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self._look, self._num_unsent_bytes)

    def _look(self, num_unsent_bytes: int) -> None:
        self._read_timer = None
        if self._num_unsent_bytes < num_unsent_bytes:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_watching_reader(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    @property
    def _num_unsent_bytes(self) -> int:
        """What waits for the client here and in the system's buffer: this one does not move for megabytes there."""
        sock = self.transport.get_extra_info("socket")
        num_in_system = bytearray(4)
        with contextlib.suppress(OSError, ValueError):  # gone, or a system that does not tell
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, num_in_system)
        return self.transport.get_write_buffer_size() + int.from_bytes(num_in_system, sys.byteorder)


_NO_HTTP = {
    400: ("this is no HTTP/1.1 request", "bad-http"),
    431: ("the headers are too large", "headers-too-large"),
    501: ("only the transfer encoding chunked is read", "bad-transfer-encoding"),
}
