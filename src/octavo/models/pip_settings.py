"""The settings of pip that say where packages come from, read without pip.

Whoever set up a mirror, a proxy or a certificate for pip has set it up for Octavo too. Precedence is pip's: environment
variables over $PIP_CONFIG_FILE over the virtual environment's, the user's and the system's pip.conf; in a file,
`[download]` over `[global]`. Every value remembers where it was set, so that an error can say which line to change.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from octavo.config.text_file import read_text_file
from octavo.errors import DownloadError, InvalidParameterError, MachineError
from octavo.units import quote

_MAX_FILE_BYTES = 1 << 20
DEFAULT_INDEX = "https://pypi.org/simple"
DEFAULT_TIMEOUT_S = 30.0
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Place:
    """An index or a folder of files, and the setting that named it."""

    url: str
    setting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """Where packages come from, and how to reach it.

    Args:
        indexes: Simple indexes, in the order to ask them.
        find_links: Folders or pages of files, asked before the indexes.
        cert: Bundle of certificate authorities; empty for the system's.
        client_cert: Certificate (and key) to show a server; empty for none.
        proxy: Proxy for every scheme; empty for what the environment says (`https_proxy`, `no_proxy` ...).
        trusted_hosts: `host` or `host:port` whose certificate is not checked.
        settings: Name of a value (`cert`, `proxy`, `timeout`) to the setting that gave it.
    """

    indexes: tuple[Place, ...]
    find_links: tuple[Place, ...]
    cert: str
    client_cert: str
    proxy: str
    trusted_hosts: tuple[str, ...]
    timeout_s: float
    settings: Mapping[str, str]


def read_pip_settings(environ: Mapping[str, str], *, root: Path = Path("/"), prefix: str = sys.prefix) -> PipSettings:
    """Read pip's environment variables and configuration files.

    Args:
        environ: The process's environment.
        root: Folder that stands for `/`, so that tests bring their own `/etc`.
        prefix: Folder of the (virtual) environment, which may hold a pip.conf.

    Raises:
        InvalidParameterError: a configuration file cannot be parsed, or the timeout is no number.
        DownloadError: an address cannot be parsed; the message names the setting.
    """
    values: dict[str, tuple[str, str]] = {}
    for path in _config_files(environ, root, Path(prefix)):
        values.update(_read_file(path))
    values.update(_read_environ(environ))

    def text(name: str) -> str:
        return values.get(name, ("", ""))[0].strip()

    def places(name: str) -> tuple[Place, ...]:
        value, setting = values.get(name, ("", ""))
        return tuple(Place(_checked_url(url, setting), setting) for url in value.split())

    indexes = places("index-url") or (Place(DEFAULT_INDEX, "pip's default index"),)
    if text("no-index").lower() in _TRUE:
        indexes = ()
    else:
        indexes += places("extra-index-url")
    cert, cert_setting = text("cert"), values.get("cert", ("", ""))[1]
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if not cert and environ.get(variable):
            cert, cert_setting = environ[variable], variable
    settings = {name: setting for name, (_, setting) in values.items() if name in {"proxy", "timeout"}}
    return PipSettings(
        indexes=indexes,
        find_links=places("find-links"),
        cert=cert,
        client_cert=text("client-cert"),
        proxy=_checked_url(text("proxy"), values.get("proxy", ("", ""))[1]),
        trusted_hosts=tuple(text("trusted-host").split()),
        timeout_s=_timeout_s(values),
        settings={**settings, "cert": cert_setting} if cert else settings,
    )


def _checked_url(url: str, setting: str) -> str:
    try:
        # The port is only looked at when it is asked for.
        _ = urlsplit(url).port
    except ValueError as error:
        raise DownloadError(
            f"{setting}: {quote(url)} is not an address", because=str(error), hints=(f"correct {setting}",)
        ) from error
    return url


def _timeout_s(values: Mapping[str, tuple[str, str]]) -> float:
    value, setting = values.get("timeout", ("", ""))
    try:
        seconds = float(value) if value else DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidParameterError(f"{value!r} is not a number of seconds", param=setting)
    return seconds


def _config_files(environ: Mapping[str, str], root: Path, prefix: Path) -> Iterator[Path]:
    """Yield pip's files, weakest first."""
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return  # pip's way of saying: read no file at all
    for folder in reversed((environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)):
        yield root / folder.lstrip("/") / "pip/pip.conf"
    yield root / "etc/pip.conf"
    home = environ.get("HOME", "")
    if home:
        yield Path(home) / ".pip/pip.conf"
        yield Path(environ.get("XDG_CONFIG_HOME") or f"{home}/.config") / "pip/pip.conf"
    yield prefix / "pip.conf"
    if named:
        yield Path(named)


def _read_file(path: Path) -> dict[str, tuple[str, str]]:
    parser = configparser.RawConfigParser()
    try:
        text = read_text_file(path, param=str(path), what="a configuration of pip", max_bytes=_MAX_FILE_BYTES)
    except MachineError:
        return {}  # not there, or not ours to read; pip skips it too
    try:
        parser.read_string(text, source=str(path))
    except configparser.Error as error:
        reason = str(error).splitlines()[0]
        raise InvalidParameterError(f"cannot be parsed: {reason}", param=str(path)) from error
    values = {}
    for section in ("global", "download"):
        if parser.has_section(section):
            for key, value in parser.items(section):
                name = _canonical(key)
                values[name] = (value, f"{name} in {path}")
    return values


def _read_environ(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    values = {}
    for variable, value in environ.items():
        if variable.startswith("PIP_") and value:
            values[_canonical(variable.removeprefix("PIP_"))] = (value, variable)
    return values


def _canonical(key: str) -> str:
    name = key.lower().replace("_", "-")
    return "timeout" if name == "default-timeout" else name
