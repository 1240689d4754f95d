"""An ablation's effects as rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.quantities import number
from steadytrain.components.tune.ablation.effects import Effect

_VERDICTS: Final = {True: "better", False: "worse", None: "not decided"}


@dataclass(frozen=True)
class Row:
    """An effect in words."""

    change: str
    difference: str
    interval: str
    p: str
    seeds: int
    verdict: str


def row(effect: Effect) -> Row:
    """Return an effect in words."""
    found = effect.estimate
    interval = p = ""
    if found and found.low is not None and found.high is not None and found.p is not None:
        interval = f"{_signed(found.low)} to {_signed(found.high)}"
        p = "<0.001" if found.p < 1e-3 else f"{found.p:.3f}"
    return Row(
        effect.comparison.change,
        _signed(found.mean) if found else "",
        interval,
        p,
        len(effect.pairs),
        _VERDICTS[effect.better],
    )


def variant_name(variant: Sequence[str], changes: int) -> str:
    """Return a variant in words.

    Args:
        changes: number of the ablation's changes.
    """
    if len(variant) == changes > 1:
        return "all changes"
    return " + ".join(variant) or "no change"


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
