"""Cases of which the default command runs a few, and `make long` all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest


def each(
    name: str, values: Collection[Any], few: Collection[Any], **options: Any
) -> Callable[..., Any]:
    """Parametrize a test by the values of a name; mark those not among the few as long."""
    marked = [
        value if value in few else pytest.param(value, marks=pytest.mark.long) for value in values
    ]
    return pytest.mark.parametrize(name, marked, **options)


def selected(request: pytest.FixtureRequest, name: str) -> set[str]:
    """Return the values of a parameter that the selected tests of this file have.

    A fixture that trains once for many tests then trains only what they look at.
    """
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {values[name] for values in parameters if name in values}
