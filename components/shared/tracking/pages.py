"""All pages of a search in MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield every item that a search finds.

    Args:
        search: returns the page with a token; None for the first one.
    """
    token = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
