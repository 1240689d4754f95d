"""All pages of a search in MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.pages import all_pages


def pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield every item that a search finds.

    Args:
        search: returns the page with a token; None for the first one.

    Raises:
        TrackingError: the list never ends.
    """

    def fetch(token: str) -> tuple[Iterable[Any], str]:
        page = search(token or None)
        return page, page.token or ""

    return all_pages(fetch, "results", TrackingError)
