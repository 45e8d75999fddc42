"""The life of a server process: a socket that answers at once, a model loaded behind it, and an orderly end.

    bind ──▶ answer "loading" ──▶ load in a thread ──▶ answer ──▶ SIGTERM or Ctrl-C ──▶ drain ──▶ end
                                                                    second signal ─────────────▶ end at once

While draining, running answers go on for up to `drain_timeout` seconds, new ones are refused with 503 and /ready says
so. What is left then is aborted: its streams end with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import ipaddress
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import InvalidParameterError, MachineError
from octavo.llm.async_llm import AsyncLLM
from octavo.server.app import create_app
from octavo.server.connection import Connection
from octavo.server.connection_limit import ConnectionLimit, resolve_max_connections
from octavo.server.front import Front
from octavo.server.security import read_keys
from octavo.server.settings import MAX_HEADER_BYTES, ServerSettings

FLUSH_S = 2.0
"""What clients get to read their last event, once everything has been aborted."""
GIVE_UP_S = 0.3
"""How long what belongs to a client may take to end once it has been given up."""
STOP_ENGINE_S = 3.0
KEEP_CONNECTION_S = 75
"""Idle connections stay open for longer than clients (5 s) and proxies (60 s) keep theirs: who closes first must not
be the one that does not know of the next request."""
_LOADER = "octavo-load"
_ENGINE = "octavo-engine"
_LOG = logging.getLogger(__name__)

Load = Callable[[], AsyncLLM]


def web_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Return how the web server runs an app.

    Raises:
        InvalidParameterError: the system does not allow as many connections as were asked for.
    """
    limit = ConnectionLimit(resolve_max_connections(settings.max_connections, max_waiting=settings.max_waiting))
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        http=functools.partial(Connection, limit=limit),  # type: ignore[arg-type] # by h11, which bounds the headers
        ws="none",
        loop="asyncio",
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_S),
        timeout_keep_alive=KEEP_CONNECTION_S,
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        proxy_headers=False,
    )


class _Server(uvicorn.Server):
    """A server whose signals are handled here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, but just before it would cancel what is left, clients that do not read are given up."""
        timeout_s = self.config.timeout_graceful_shutdown or 0
        timer = asyncio.get_running_loop().call_later(timeout_s - GIVE_UP_S, self.give_up_clients)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def give_up_clients(self) -> None:
        """Close every connection, whatever its client has not read yet."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.abort()


class Lifecycle:
    """One run of a server.

    Args:
        load: Makes the engine; runs in a thread.
        settings: What was asked of the server.
        on_listening: Told the address as soon as the socket answers.
        on_ready: Told the engine once requests are taken.
    """

    def __init__(
        self,
        load: Load,
        settings: ServerSettings,
        *,
        on_listening: Callable[[str], None],
        on_ready: Callable[[AsyncLLM, str], None],
    ) -> None:
        self._load = load
        self._settings = settings
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._llm: AsyncLLM | None = None
        self._signals: list[signal.Signals] = []
        self._ending: list[asyncio.Task[None]] = []

    @property
    def has_threads_left(self) -> bool:
        """Whether something that cannot be interrupted goes on: loading, or a step that did not end in time."""
        return any(thread.name in (_LOADER, _ENGINE) for thread in threading.enumerate())

    def run(self) -> int:
        """Serve until a signal says otherwise; return the exit code, which is to be exited with.

        Mutates: signals that end a server are ignored from then on.

        Raises:
            MachineError: the address cannot be had.
            OctavoError: what loading the model raised.
        """
        read_keys(self._settings)  # before anything is bound or loaded
        sock = _bind(self._settings)
        try:
            return asyncio.run(self._run(sock))
        finally:
            gc.unfreeze()
            sock.close()

    async def _run(self, sock: socket.socket) -> int:
        front = Front(self._settings)
        self._server = _Server(web_config(front, self._settings))
        loop = asyncio.get_running_loop()
        # A terminal that is closed ends the server in order, too, unless nohup has said that it shall go on.
        hangs_up = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        handled = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else []))
        for each in handled:
            loop.add_signal_handler(each, self._take_signal, each)
        serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        address = _address(sock, self._settings.host)
        self._on_listening(address)
        loading = _in_thread(self._load)
        try:
            await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                self._llm = loading.result()
                self._llm.start()
                front.open(create_app(self._llm, self._settings))
                _leave_to_stay()
                if not self._signals:
                    self._on_ready(self._llm, address)
            await serving
        finally:
            await self._end(serving)
            for each in handled:
                # All is done but to exit: a signal more must not make it a death by signal, or a traceback.
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_IGN)
        return 130 if signal.SIGINT in self._signals else 143 if len(self._signals) > 1 else 0

    async def _end(self, serving: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        if not serving.done():
            await serving
        for task in self._ending:
            task.cancel()
        if self._llm is not None:
            await self._llm.stop(STOP_ENGINE_S)

    def _take_signal(self, received: signal.Signals) -> None:
        self._signals.append(received)
        if self._llm is None:
            self._server.should_exit = True
        elif len(self._signals) == 1:
            _LOG.info("%s: draining for up to %g s; again to stop at once", received.name, self._settings.drain_timeout)
            self._ending.append(asyncio.ensure_future(self._drain_and_exit(self._settings.drain_timeout)))
        elif len(self._signals) == 2:
            _LOG.info("%s: stopping at once", received.name)
            self._ending.append(asyncio.ensure_future(self._exit_at_once()))
        else:
            self._ending.append(asyncio.ensure_future(self._force_exit()))

    async def _drain_and_exit(self, deadline_s: float) -> None:
        assert self._llm is not None
        loop = asyncio.get_running_loop()
        deadline_at_s = loop.time() + deadline_s
        await self._llm.drain(deadline_s)
        # Clients have the rest of the time to read what has been answered; aborted streams end with an event.
        self._server.config.timeout_graceful_shutdown = math.ceil(max(FLUSH_S, deadline_at_s - loop.time()))
        self._server.should_exit = True

    async def _exit_at_once(self) -> None:
        assert self._llm is not None
        await self._llm.drain(0.0)
        self._server.should_exit = True
        await asyncio.sleep(FLUSH_S)
        await self._force_exit()

    async def _force_exit(self) -> None:
        """Wait for no client; what answers them ends by itself rather than being cut off in the middle."""
        self._server.give_up_clients()
        await asyncio.sleep(GIVE_UP_S)
        self._server.force_exit = True


def _leave_to_stay() -> None:
    """Let the collector look no more at what stays to the end: going through it all took a twentieth of a second."""
    gc.collect()
    gc.freeze()


def _in_thread(load: Load) -> asyncio.Future[AsyncLLM]:
    """Run `load` in a thread that does not outlive the process: a signal while loading ends it at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[AsyncLLM] = loop.create_future()

    def tell(done: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if future.done() else done())

    def run() -> None:
        try:
            llm = load()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            failed = error
            tell(lambda: future.set_exception(failed))
        else:
            tell(lambda: future.set_result(llm))

    threading.Thread(target=run, name=_LOADER, daemon=True).start()
    return future


def _bind(settings: ServerSettings) -> socket.socket:
    """Return a listening socket.

    Raises:
        InvalidParameterError: the host is no address of this machine.
        MachineError: the port is taken, or not for us.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidParameterError(f"{settings.host!r} is no address: {error}", param="host") from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        hints = ("--port 0 takes a free one",) if error.errno == errno.EADDRINUSE else ()
        raise MachineError(
            f"cannot listen on {settings.host} port {settings.port}", because=str(error.strerror), hints=hints
        ) from error
    sock.setblocking(False)
    return sock


def _address(sock: socket.socket, host: str) -> str:
    """Return a URL that reaches the socket from this machine."""
    port = sock.getsockname()[1]
    bound = sock.getsockname()[0]
    if ipaddress.ip_address(bound).is_unspecified:
        host = "127.0.0.1" if sock.family == socket.AF_INET else "[::1]"
    elif ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
