"""A real browser, Debian's Chromium, that reports every error and every request."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

WAIT = 300_000
"""Milliseconds until the browser must have started, or the page must show something."""


@dataclass
class Watched:
    """A page, the errors that it reported, and the addresses that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def chromium(**context: Any) -> Iterator[Watched]:
    """Open an empty page. Skip the test where there is no browser.

    Args:
        context: as for playwright's `new_context`.
    """
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no browser: install Debian's chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # Containers lack what Chromium's own sandbox needs.
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=WAIT
        )
        opened = browser.new_context(**context)
        opened.set_default_timeout(WAIT)
        watched = Watched(opened.new_page())
        watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
        watched.page.on(
            "console",
            lambda said: watched.errors.append(said.text) if said.type == "error" else None,
        )
        watched.page.on("request", lambda asked: watched.requests.append(asked.url))
        try:
            yield watched
        finally:
            browser.close()
