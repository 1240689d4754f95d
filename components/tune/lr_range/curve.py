"""The loss over a growing learning rate, and the range that it suggests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel

_SMOOTHING: Final = 0.8
"""Weight of the earlier losses. It delays the curve by about 4 steps, a fifth of a decade."""
_EXPLODED: Final = 4.0
"""As in fastai: the test ends when the smoothed loss is this many times its minimum."""
_FALLS: Final = 0.1
"""Share of the whole improvement after which the loss counts as falling."""
_LEAST: Final = 0.01
"""Improvement as a share of the first loss below which nothing was learned."""


class Point(BaseModel):
    """A step of the test."""

    rate: float
    loss: float
    smoothed: float


class RangeResult(BaseModel):
    """What a range test found.

    low: rate from which the smoothed loss falls; None if it never did.
    high: rate of its minimum.
    steepest: rate at which it falls fastest per decade.
    exploded: rate at which the test ended early; None if it reached its highest rate.
    """

    low: float | None
    high: float | None
    steepest: float | None
    exploded: float | None
    points: list[Point]


def curve_of(losses: Sequence[tuple[float, float]]) -> list[Point]:
    """Return the points of (rate, loss) pairs, smoothed exponentially without bias at the start."""
    points, mean = list[Point](), 0.0
    for count, (rate, loss) in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        points.append(Point(rate=rate, loss=loss, smoothed=mean / (1 - _SMOOTHING**count)))
    return points


def exploded(points: Sequence[Point]) -> bool:
    """Return whether the loss has left its minimum for good."""
    if not points:
        return False
    last = points[-1].smoothed
    return not math.isfinite(last) or last > _EXPLODED * min(item.smoothed for item in points)


def suggested(points: Sequence[Point], *, ended_early: bool) -> RangeResult:
    """Return the range between the rates at which the loss begins and ceases to fall.

    Args:
        ended_early: whether the loss exploded, or was not finite, at the next rate.
    """
    stop = points[-1].rate if points and ended_early else None
    none = RangeResult(low=None, high=None, steepest=None, exploded=stop, points=list(points))
    if not points:
        return none
    best = min(range(len(points)), key=lambda index: points[index].smoothed)
    top, bottom = max(item.smoothed for item in points[: best + 1]), points[best].smoothed
    if top - bottom < _LEAST * abs(top):
        return none
    limit = top - _FALLS * (top - bottom)
    # The last point above the limit: before it, the loss only wobbled.
    start = max(index for index in range(best + 1) if points[index].smoothed >= limit)
    steepest = min(range(start, best), key=lambda index: _slope(points, index))
    return none.model_copy(
        update={
            "low": points[start].rate,
            "high": points[best].rate,
            "steepest": points[steepest].rate,
        }
    )


def _slope(points: Sequence[Point], index: int) -> float:
    """Return the change of the smoothed loss per decade from a point to the next."""
    here, following = points[index], points[index + 1]
    return (following.smoothed - here.smoothed) / math.log10(following.rate / here.rate)
