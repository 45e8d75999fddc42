"""A headless Chromium for tests of the page; Debian's, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_ARGUMENTS = (
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


def chromium_path() -> str | None:
    """Return where Chromium is installed; `None` if it is not."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium; it ends with the context."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only the tests of the page need it

    path = chromium_path()
    assert path is not None, "ask chromium_path() first"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
