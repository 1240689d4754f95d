"""Comparisons of configurations: as rows of text, and as a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from markupsafe import Markup

from steadytrain.components.pages.charts import intervals
from steadytrain.components.shared.quantities import number
from steadytrain.components.tune.paired import Estimate

_VERDICTS: Final = {True: "better", False: "worse", None: "not decided"}
_KINDS: Final = {True: "best", False: "failed", None: "stopped"}
Row = tuple[str, list[str]]
"""A name, and what belongs to it in words."""


class Compared(Protocol):
    """A comparison: the differences, their mean, and whether it is an improvement."""

    @property
    def pairs(self) -> Mapping[int, float]: ...
    @property
    def estimate(self) -> Estimate | None: ...
    @property
    def better(self) -> bool | None: ...


def row(name: str, item: Compared) -> Row:
    """Return a comparison in words: difference, interval, p, number of pairs, and verdict."""
    found, p = item.estimate, ""
    if found and found.p is not None:
        p = "<0.001" if found.p < 1e-3 else f"{found.p:.3f}"
    difference = _signed(found.mean) if found else ""
    ends = interval(found, _signed) if found else ""
    return name, [difference, ends, p, str(len(item.pairs)), _VERDICTS[item.better]]


def chart(title: str, items: Iterable[tuple[str, Compared]]) -> Markup:
    """Draw the interval of each comparison that has one."""
    rows = [
        (name, found.low, found.mean, found.high, _KINDS[item.better])
        for name, item in items
        if (found := item.estimate) and found.low is not None and found.high is not None
    ]
    return intervals(title, rows)


def interval(found: Estimate, show: Callable[[float], str] = number) -> str:
    """Return an interval in words; "" if there is none."""
    if found.low is None or found.high is None:
        return ""
    return f"{show(found.low)} to {show(found.high)}"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
