"""Nginx: a real nginx in front of servers of a test, with the configuration that the docs recommend.

with Nginx(Path("docs/nginx.conf"), tmp_path, ports=(8123, 8124)) as proxy:
    httpx.get(f"{proxy.url}/ready")
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from octavo.testing.server_process import free_port

START_S = 30.0
_MAIN = """daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{}}
http {{
    log_format upstreams '$status $upstream_addr';
    access_log {folder}/access.log upstreams;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


def find_nginx() -> str | None:
    """Return the path of nginx, if it is installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


class Nginx:
    """One process of nginx on a free port, without rights and outside of the system's own folders.

    Args:
        site: The file that a person would put into `conf.d`, with two servers on ports 8000 and 8001.
        folder: For its configuration, logs and temporary files; empty.
        ports: Where the two servers really are; one for both, if there is only one.
        read_timeout_s: Silence after which it gives up.
    """

    def __init__(self, site: Path, folder: Path, *, ports: Sequence[int], read_timeout_s: float = 60.0) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        text = site.read_text(encoding="utf-8")
        changes = {
            "listen 80;": f"listen 127.0.0.1:{self._port};",
            "127.0.0.1:8000 ": f"127.0.0.1:{ports[0]} ",
            "127.0.0.1:8001 ": f"127.0.0.1:{ports[-1]} ",
            "proxy_read_timeout 60s;": f"proxy_read_timeout {round(read_timeout_s * 1000)}ms;",
        }
        for shown, meant in changes.items():
            assert text.count(shown) == 1, f"the example has no {shown!r}"
            text = text.replace(shown, meant)
        (folder / "site.conf").write_text(text, encoding="utf-8")
        (folder / "nginx.conf").write_text(_MAIN.format(folder=folder), encoding="utf-8")

    @property
    def num_passed_on(self) -> int:
        """How many requests it sent to the second server, because the first would not have them."""
        return sum("," in line for line in self._read("access.log").splitlines())

    @property
    def errors(self) -> str:
        return self._read("error.log")

    def __enter__(self) -> Self:
        program = find_nginx()
        assert program is not None, "nginx is not installed"
        self._process = subprocess.Popen(  # noqa: S603
            [program, "-p", self._folder, "-e", self._folder / "error.log", "-c", self._folder / "nginx.conf"]
        )
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                httpx.get(self.url)
            except httpx.TransportError:
                assert self._process.poll() is None, self.errors
                assert time.monotonic() < deadline_s, "nginx did not start"
                time.sleep(0.02)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(START_S)

    def _read(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""
