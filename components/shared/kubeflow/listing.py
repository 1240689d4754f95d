"""Read all pages of the KFP server's list calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from steadytrain.components.shared.errors import ServerError
from steadytrain.components.shared.pagination import all_pages

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
