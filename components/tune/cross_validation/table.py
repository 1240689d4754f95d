"""Estimates and comparisons of a cross-validation in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.quantities import number
from steadytrain.components.tune.ablation.paired import Estimate
from steadytrain.components.tune.cross_validation.results import Comparison

_VERDICTS: Final = {True: "better", False: "worse", None: "not decided"}


@dataclass(frozen=True)
class Row:
    """A comparison in words."""

    configuration: str
    difference: str
    interval: str
    p: str
    folds: int
    verdict: str


def compared(item: Comparison) -> Row:
    """Return a comparison in words."""
    found, p = item.estimate, ""
    if found and found.p is not None:
        p = "<0.001" if found.p < 1e-3 else f"{found.p:.3f}"
    return Row(
        item.configuration,
        _signed(found.mean) if found else "",
        interval(found) if found else "",
        p,
        len(item.pairs),
        _VERDICTS[item.better],
    )


def interval(found: Estimate) -> str:
    """Return an interval in words; "" if there is none."""
    if found.low is None or found.high is None:
        return ""
    return f"{number(found.low)} to {number(found.high)}"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
