"""ServerProcess: a real `octavo serve` for tests, on a free port, stopped at the end.

with ServerProcess(str(folder), "--threads", "1") as server:
    httpx.get(f"{server.url}/health")
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import IO, Any, Self

START_S = 60.0
STOP_S = 30.0
SMALL = ("--threads", "1", "--num-blocks", "256", "--max-model-len", "1024")
"""Options for a tiny model: little memory, one core."""
_LISTENING = re.compile(r"listening on (http://\S+?),")


class ServerProcess:
    """`octavo serve ARGS --port 0`.

    Args:
        args: The command line after `serve`.
        environ: Variables besides PATH and PYTHONPATH.
        waits: Come back only when the model has been loaded; else as soon as the socket answers.
        port: To listen on; 0 is a free one.
    """

    def __init__(self, *args: str, environ: dict[str, str] | None = None, waits: bool = True, port: int = 0) -> None:
        self._args = args
        self._environ = environ or {}
        self._waits = waits
        self._port = port
        self.url = ""
        self.document: dict[str, Any] = {}

    def __enter__(self) -> Self:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "octavo", "serve", *self._args, "--port", str(self._port), "--json"],
            env={**kept, **self._environ},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, lines), daemon=True)
        self._reader.start()
        try:
            if self._waits:
                self.document = json.loads(self._first_line(lines))
                assert "url" in self.document, self.document
                self.url = self.document["url"]
            else:
                self.url = self.wait_for(self._listening)
        except BaseException:
            self.kill()
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.exit_code is None:
            # Two signals stop it at once; how it ends in peace is the subject of tests of its own.
            for _ in range(2):
                self.signal(signal.SIGTERM)
                time.sleep(0.01)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        self._close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        self._log.flush()
        with open(f"/proc/self/fd/{self._log.fileno()}", encoding="utf-8") as reader:  # noqa: PTH123
            return reader.read()

    def signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(which)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STOP_S)

    def _close(self) -> None:
        self._reader.join(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for the end; return the exit code."""
        return self._process.wait(timeout_s)

    def wait_for(self, question: Callable[[], Any], timeout_s: float = START_S) -> Any:
        """Ask until the answer is true, and return it."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            answer = question()
            if answer:
                return answer
            assert self.exit_code is None, f"the server ended: {self.log}"
            time.sleep(0.02)
        raise TimeoutError(f"not within {timeout_s} s; the log says {self.log}")

    def _listening(self) -> str | None:
        found = _LISTENING.search(self.log)
        return found.group(1) if found else None

    def _first_line(self, lines: queue.Queue[str]) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            try:
                line = lines.get(timeout=0.1)
            except queue.Empty:
                assert self.exit_code is None, f"the server ended: {self.log}"
                continue
            assert line, f"the server ended: {self.log}"
            return line
        raise TimeoutError(f"no start within {START_S} s; the log says {self.log}")


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives to no client of its own accord.

    For a server that is to come back where it was: a port from `bind(0)` may be somebody's client by then.
    """
    random = Random()  # unseeded: two tests at once should not try the same ones
    for _ in range(1000):
        port = random.randrange(20_000, 32_000)
        with contextlib.closing(socket.socket()) as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise TimeoutError("no port is free")


def _read(stdout: IO[str], lines: queue.Queue[str]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put("")
