"""Read all pages of the KFP server's list calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

from steadytrain.components.shared.errors import ServerError

_PAGE = 100


def pages(call: Callable[..., Any], items: str, **options: Any) -> Iterator[Any]:
    """Yield every item.

    Args:
        call: a list call of kfp_server_api.
        items: the field of its response that holds the items.
        options: passed to the call.

    Raises:
        ServerError: if the call failed, or the server repeats a page token, so that the list would
            never end.
    """
    token, seen = "", {""}
    while True:
        page = call(page_size=_PAGE, page_token=token, **options)
        yield from getattr(page, items) or ()
        token = page.next_page_token or ""
        if not token:
            return
        if token in seen:
            raise ServerError(
                f"the server repeats a page of its {items.replace('_', ' ')}, so its list never "
                "ends",
                remedy="look for a proxy that caches the server's answers, or upgrade the server",
            )
        seen.add(token)


def named(key: str, value: str, operation: Literal["EQUALS", "IS_SUBSTRING"] = "EQUALS") -> str:
    """Return a filter for one value of one field."""
    predicate = {"operation": operation, "key": key, "string_value": value}
    return json.dumps({"predicates": [predicate]})
