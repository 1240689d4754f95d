"""Which test files have no test that a marker expression selects, so that nothing imports them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

MARKERS = ("slow", "long", "soak", "bench", "gpu")


@functools.cache
def required(expression: str) -> frozenset[str]:
    """Return the markers without which an expression selects no test."""
    names = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    compiled = Expression.compile(expression)

    def selects(chosen: Iterable[str]) -> bool:
        return compiled.evaluate(lambda name, **_: name in chosen)

    def subsets(of: set[str]) -> Iterable[tuple[str, ...]]:
        return (some for size in range(len(of) + 1) for some in itertools.combinations(of, size))

    return frozenset(
        name
        for name in names.intersection(MARKERS)
        if not any(map(selects, subsets(names - {name})))
    )


@functools.cache
def may_have(path: Path, marker: str) -> bool:
    """Return whether a test of a file may have a marker: the file or its conftest.py names it.

    `support.selected` marks cases as long.
    """
    if marker == "slow" and path.parent.name == "end_to_end":
        return True  # the conftest.py there marks all but a few
    files = [path, *(item for item in [path.with_name("conftest.py")] if item.exists())]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = f"{marker}|selected" if marker == "long" else marker
    return bool(re.search(rf"\b({names})\b", text))


def check_markers(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError if a test has a marker that its file does not name: it would be left out."""
    for item in items:
        for marker in item.iter_markers():
            if marker.name in MARKERS and not may_have(item.path, marker.name):
                raise pytest.UsageError(
                    f"{item.nodeid} is {marker.name}, but its file doesn't say so"
                )
