"""Read all pages of the KFP server's list calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, TypeVar

from steadytrain.components.shared.errors import ServerError, SteadytrainError, TrackingError

T = TypeVar("T")

MOST_PAGES: Final = 1000
SECONDS: Final = 600.0
"""Longest time for all pages."""


def all_pages(
    fetch: Callable[[str], tuple[Iterable[T], str]],
    what: str,
    error: type[SteadytrainError],
) -> Iterator[T]:
    """Yield every item of a list.

    Args:
        fetch: returns the items of the page with a token, and the next page's token. "" is the
            token of the first page, and the one after the last.
        what: the items' name, for messages.
        error: raised if the list does not end: the server repeats a page, has more than MOST_PAGES,
            or takes longer than SECONDS.
    """
    token, seen, end = "", {""}, time.monotonic() + SECONDS
    while True:
        items, token = fetch(token)
        yield from items
        if not token:
            return
        if token in seen or len(seen) >= MOST_PAGES or time.monotonic() > end:
            raise error(
                f"the server {'repeats a page' if token in seen else 'has ever more pages'} of its "
                f"{what}, so its list never ends",
                remedy="look for a proxy that caches the server's answers, or upgrade the server",
            )
        seen.add(token)


def all_items(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield every item that a search in MLflow finds.

    Args:
        search: returns the page with a token; None for the first one.

    Raises:
        TrackingError: the list never ends.
    """

    def fetch(token: str) -> tuple[Iterable[Any], str]:
        page = search(token or None)
        return page, page.token or ""

    return all_pages(fetch, "results", TrackingError)


_PAGE = 100


def pages(call: Callable[..., Any], items: str, **options: Any) -> Iterator[Any]:
    """Yield every item.

    Args:
        call: a list call of kfp_server_api.
        items: the field of its response that holds the items.
        options: passed to the call.

    Raises:
        ServerError: if the call failed, or the list never ends.
    """

    def fetch(token: str) -> tuple[Iterable[Any], str]:
        page = call(page_size=_PAGE, page_token=token, **options)
        return getattr(page, items) or (), page.next_page_token or ""

    return all_pages(fetch, items.replace("_", " "), ServerError)


def named(key: str, value: str, operation: Literal["EQUALS", "IS_SUBSTRING"] = "EQUALS") -> str:
    """Return a filter for one value of one field."""
    predicate = {"operation": operation, "key": key, "string_value": value}
    return json.dumps({"predicates": [predicate]})
