"""Finding one wheel in pip's places: simple indexes (HTML or JSON), pages of links, and folders.

Source: the simple repository API of the Python packaging specifications (PEP 503 and 691).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import url2pathname

from octavo.config.text_file import read_text_file
from octavo.errors import DownloadError, InvalidParameterError, MachineError
from octavo.models.pip_settings import PipSettings, Place
from octavo.models.web import TransientError, Web, shown

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MAX_PAGE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class FoundWheel:
    """Where a wheel can be had: a URL or a local file, and the setting that led there."""

    url: str
    setting: str

    @property
    def local_path(self) -> Path | None:
        return _local_path(self.url)


def find_wheel(web: Web, settings: PipSettings, *, package: str, wheel_name: str) -> Iterator[FoundWheel]:
    """Yield the places that offer a wheel, in the order to try them.

    Raises:
        DownloadError: no place offers it; the message says what each answered and which setting named it.
    """
    answers: list[str] = []
    is_found = False
    for place, url in _pages(settings, package):
        try:
            links = _links(web, url)
        except (TransientError, DownloadError) as error:
            answers.append(f"{shown(url)} ({place.setting}): {error.args[0]}")
            continue
        found = [link for link in links if _file_name(link) == wheel_name]
        if not found:
            answers.append(f"{shown(url)} ({place.setting}): does not list it")
        for link in found:
            is_found = True
            yield FoundWheel(link, place.setting)
    if not is_found:
        raise DownloadError(
            f"no package index offers {wheel_name}",
            because="; ".join(answers) or "pip is set to use no index (PIP_NO_INDEX) and no folder (PIP_FIND_LINKS)",
            hints=("set PIP_INDEX_URL to an index that can be reached, or PIP_FIND_LINKS to a folder with the wheel",),
        )


def _pages(settings: PipSettings, package: str) -> Iterator[tuple[Place, str]]:
    for place in settings.find_links:
        yield place, place.url
    for place in settings.indexes:
        yield place, place.url.rstrip("/") + f"/{_normal(package)}/"


def _links(web: Web, url: str) -> list[str]:
    path = _local_path(url)
    if path is not None:
        return _local_links(path)
    with web.open(url, headers={"Accept": _ACCEPT}) as response:
        try:
            body = response.read(_MAX_PAGE_BYTES)
        except OSError as error:
            raise TransientError(f"the connection broke: {error}") from error
        kind = response.headers.get("Content-Type", "")  # type: ignore[attr-defined]
        base = response.url  # type: ignore[attr-defined]
    text = body.decode("utf-8", errors="replace")
    if "json" in kind:
        return _json_links(text, base)
    return _html_links(text, base)


def _local_links(path: Path) -> list[str]:
    page = path / "index.html"
    if path.is_dir() and not page.is_file():
        return [each.absolute().as_uri() for each in sorted(path.iterdir())]
    page = page if path.is_dir() else path
    try:
        text = read_text_file(page, param="index", what="a list of files", max_bytes=_MAX_PAGE_BYTES, is_lenient=True)
    except (MachineError, InvalidParameterError) as error:
        raise DownloadError(error.because or error.message) from error
    return _html_links(text, page.absolute().as_uri())


def _json_links(text: str, base: str) -> list[str]:
    try:
        return [urljoin(base, each["url"]) for each in json.loads(text)["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DownloadError("the answer is no list of files") from error


def _html_links(text: str, base: str) -> list[str]:
    parser = _Anchors(base)
    parser.feed(text)
    parser.close()
    return parser.links


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self._base = base
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href and tag == "base":
            self._base = urljoin(self._base, href)
        elif href and tag == "a":
            self.links.append(urljoin(self._base, href))


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _local_path(url: str) -> Path | None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return None if parts.scheme in {"http", "https"} else Path(url).expanduser()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
