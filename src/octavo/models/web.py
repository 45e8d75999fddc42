"""HTTP for fetching models: pip's proxy, certificates and credentials, redirects by hand, errors a person can act on.

Standard library only, so that fetching works in an environment without pip. Credentials (from a URL or ~/.netrc) go
only to the host and port they belong to, also after a redirect, and no message ever shows them.
"""

from __future__ import annotations

import base64
import http.client
import importlib
import netrc
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from octavo.errors import DownloadError
from octavo.models.pip_settings import PipSettings
from octavo.version import __version__

MAX_REDIRECTS = 10


class TransientError(Exception):
    """Something that may go better next time: a cut connection, a busy server."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # Redirects are followed by hand: each hop chooses its own certificate check and credentials.
    def redirect_request(self, *_: object) -> None:
        return None


class Web:
    """Opens URLs as pip would.

    Args:
        settings: What pip is set to.
        environ: Of the process; tells the home folder for ~/.netrc.
    """

    __slots__ = ("_credentials", "_environ", "_openers", "_settings")

    def __init__(self, settings: PipSettings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._credentials: dict[str, str] = {}
        self._openers: dict[bool, urllib.request.OpenerDirector] = {}

    def open(self, url: str, *, headers: Mapping[str, str]) -> IO[bytes]:
        """Open a URL for reading; the response has `status`, `headers` and the final `url`.

        Raises:
            TransientError: worth another try.
            DownloadError: not worth one.
        """
        for _ in range(MAX_REDIRECTS):
            plain_url = self._take_credentials(url)
            sent = {"User-Agent": f"octavo/{__version__}", "Accept-Encoding": "identity", **headers}
            authorization = self._authorization(plain_url)
            if authorization:
                sent["Authorization"] = authorization
            try:
                request = urllib.request.Request(plain_url, headers=sent)  # noqa: S310 - schemes are checked below
                response: IO[bytes] = self._opener(plain_url).open(request, timeout=self._settings.timeout_s)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in {301, 302, 303, 307, 308} or not error.headers.get("Location"):
                        raise _from_status(error, plain_url) from error
                    url = urljoin(plain_url, error.headers["Location"])
                if urlsplit(url).scheme not in {"http", "https"}:
                    raise DownloadError(f"{shown(plain_url)} redirects to {shown(url)}, which is not HTTP") from error
            except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
                raise self._from_failure(error, plain_url) from error
            else:
                return response
        raise DownloadError(f"{shown(url)} redirects more than {MAX_REDIRECTS} times")

    def _take_credentials(self, url: str) -> str:
        parts = urlsplit(url)
        userinfo, at, host = parts.netloc.rpartition("@")
        if at:
            user, _, password = userinfo.partition(":")
            self._credentials[host] = _basic(unquote(user), unquote(password))
        return urlunsplit(parts._replace(netloc=host, fragment=""))

    def _authorization(self, url: str) -> str:
        host = urlsplit(url).netloc
        if host in self._credentials:
            return self._credentials[host]
        path = Path(self._environ.get("NETRC") or Path(self._environ.get("HOME", "/nonexistent")) / ".netrc")
        try:
            is_there = path.is_file()  # a device may have no end
            found = netrc.netrc(path).authenticators(urlsplit(url).hostname or "") if is_there else None
        except (OSError, netrc.NetrcParseError):
            found = None
        return _basic(found[0], found[2] or "") if found else ""

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        parts = urlsplit(url)
        is_trusted = any(host in {parts.netloc, parts.hostname} for host in self._settings.trusted_hosts)
        if is_trusted not in self._openers:
            handlers: list[urllib.request.BaseHandler] = [
                _NoRedirect(),
                urllib.request.HTTPSHandler(context=self._tls_context(is_trusted=is_trusted)),
            ]
            if self._settings.proxy:
                proxies = dict.fromkeys(("http", "https"), self._settings.proxy)
                handlers.append(urllib.request.ProxyHandler(proxies))
            self._openers[is_trusted] = urllib.request.build_opener(*handlers)
        return self._openers[is_trusted]

    def _tls_context(self, *, is_trusted: bool) -> ssl.SSLContext:
        settings = self._settings
        try:
            context = ssl.create_default_context(cafile=settings.cert or None)
            if settings.client_cert:
                context.load_cert_chain(settings.client_cert)
        except OSError as error:
            name = settings.settings.get("cert", "client-cert")
            raise DownloadError(f"cannot read the certificates that {name} names: {error}") from error
        if not settings.cert and not _has_system_certificates():
            _load_certifi(context)
        if is_trusted:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _from_failure(self, error: Exception, url: str) -> Exception:
        reason: Any = getattr(error, "reason", error)
        host = shown(url)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return DownloadError(
                f"the certificate of {host} is not trusted: {reason.verify_message}",
                hints=("set PIP_CERT to the bundle of your certificate authority",),
            )
        via = ""
        if self._settings.proxy:
            via = f" through the proxy of {self._settings.settings.get('proxy', 'pip')}"
        elif urllib.request.getproxies().get(urlsplit(url).scheme):
            via = f" through the proxy of {urlsplit(url).scheme}_proxy"
        return TransientError(f"cannot reach {host}{via}: {reason}")


def shown(url: str) -> str:
    """Return a URL as a message may show it: without credentials, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")


def _from_status(error: urllib.error.HTTPError, url: str) -> Exception:
    text = f"{shown(url)} answers {error.code} {error.reason}"
    if error.code in {408, 425, 429, 500, 502, 503, 504}:
        return TransientError(text)
    hints: tuple[str, ...] = ()
    if error.code in {401, 403}:
        hints = ("put a user and password into the URL of the index, or into ~/.netrc",)
    if error.code == 407:
        hints = ("put a user and password into the URL of the proxy (PIP_PROXY or https_proxy)",)
    return DownloadError(text, hints=hints)


def _has_system_certificates() -> bool:
    paths = ssl.get_default_verify_paths()
    return bool(paths.cafile or paths.capath)


def _load_certifi(context: ssl.SSLContext) -> None:
    # A bare container has no certificates; the bundle that comes with the hub's client will do.
    try:
        certifi = importlib.import_module("certifi")
    except ImportError:
        return
    context.load_verify_locations(cafile=certifi.where())
