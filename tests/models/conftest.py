"""A small web server on this machine, whose answers a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class Answer:
    """What the server sends. `cut_at` closes the connection after so many bytes of the body."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None


@dataclass
class Asked:
    """A request the server saw."""

    path: str
    headers: dict[str, str]


class LocalServer:
    """Answers by path; a list of answers is used up one by one, its last stays. Remembers every request."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | list[Answer] | Callable[[Asked], Answer]] = {}
        self.asked: list[Asked] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply(with_body=True)

            def do_HEAD(self) -> None:
                self._reply(with_body=False)

            def log_message(self, *_: object) -> None:
                pass

            def _reply(self, *, with_body: bool) -> None:
                asked = Asked(self.path, {name.lower(): value for name, value in self.headers.items()})
                answer = server.answer(asked)
                self.send_response(answer.status)
                headers = {"Content-Length": str(len(answer.body)), **answer.headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(answer.body if answer.cut_at is None else answer.body[: answer.cut_at])
                if answer.cut_at is not None:
                    self.close_connection = True

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._http.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        found = self.answers.get(asked.path.partition("?")[0], Answer(status=404))
        if callable(found):
            return found(asked)
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def make_server() -> Iterator[Callable[[], LocalServer]]:
    servers: list[LocalServer] = []

    def make() -> LocalServer:
        servers.append(LocalServer())
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server) -> LocalServer:
    return make_server()


@pytest.fixture
def answer() -> type[Answer]:
    return Answer
