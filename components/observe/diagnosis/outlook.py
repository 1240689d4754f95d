"""Where a validation loss is heading: a power law through it, if one fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

_VALIDATIONS: Final = 8
"""Fewest validations for a fit with three unknowns and a part held out."""
_EXPONENTS: Final = [0.05 * place for place in range(1, 61)]


@dataclass(frozen=True)
class Outlook:
    """What more steps would gain.

    gain: fall of the loss below the fit at the last validation.
    error: of the last quarter of the curve, predicted from the part before; the mean deviation.
    """

    gain: float
    error: float


@dataclass(frozen=True)
class _PowerLaw:
    """The loss is floor + scale * step ** -exponent."""

    floor: float
    scale: float
    exponent: float

    def at(self, step: float) -> float:
        return self.floor + self.scale * math.pow(step, -self.exponent)

    def deviation(self, points: Sequence[tuple[int, float]]) -> float:
        return fmean(abs(self.at(step) - loss) for step, loss in points)


def extrapolated(points: Sequence[tuple[int, float]], step: int) -> Outlook | None:
    """Return what training until `step` would gain; None if no power law fits well enough.

    Args:
        points: steps and losses, by step.
    """
    if len(points) < _VALIDATIONS:
        return None
    early = len(points) * 3 // 4
    whole, first = _fit(points), _fit(points[:early])
    if whole is None or first is None:
        return None
    gain = whole.at(points[-1][0]) - whole.at(step)
    error = first.deviation(points[early:])
    if gain <= 0 or error > gain / 2 or whole.deviation(points) > gain / 2:
        return None
    return Outlook(gain, error)


def _fit(points: Sequence[tuple[int, float]]) -> _PowerLaw | None:
    """Return the falling power law with the least squares; None if the loss does not fall."""
    best, least = None, math.inf
    losses = [loss for _, loss in points]
    mean = fmean(losses)
    for exponent in _EXPONENTS:
        powers = [step**-exponent for step, _ in points]
        center = fmean(powers)
        spread = sum((power - center) ** 2 for power in powers)
        shared = sum((power - center) * loss for power, loss in zip(powers, losses, strict=True))
        law = _PowerLaw(mean - shared / spread * center, shared / spread, exponent)
        squares = sum((law.at(step) - loss) ** 2 for step, loss in points)
        if law.scale > 0 and law.floor >= 0 and squares < least:
            best, least = law, squares
    return best
