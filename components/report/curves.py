"""Curves of training: choose the points that count, and thin them out for drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.events.types import (
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)

Point = tuple[float, float]
E = TypeVar("E", TrainingStep, Validated, NoiseScaleMeasured)

DRAWN_POINTS = 400
"""Maximum number of points in a line. A chart is about 400 pixels wide."""


@dataclass(frozen=True)
class Curve:
    """One measure by step.

    points: (step, value), finite values only, in step order.
    broken: steps with a value that is not finite.
    """

    name: str
    points: Sequence[Point]
    broken: Sequence[float] = ()


def training_curve(facts: Facts, name: str, value: Callable[[TrainingStep], float]) -> Curve:
    """Return a measure of the training steps that count."""
    return _curve(name, ((event.step, value(event)) for event in standing(facts.of(TrainingStep))))


def validation_curve(facts: Facts, name: str, metric: str) -> Curve:
    """Return a validation score by step."""
    events = standing(facts.of(Validated))
    return _curve(
        name, ((event.step, event.metrics[metric]) for event in events if metric in event.metrics)
    )


def standing(events: Iterable[E]) -> list[E]:
    """Return the events of the steps that led to the final model.

    An attempt that resumes from a checkpoint repeats the steps after it, so earlier events of these
    steps no longer count.
    """
    kept: list[E] = []
    for event in events:
        while kept and kept[-1].step >= event.step:
            kept.pop()
        kept.append(event)
    return kept


def thin(points: Sequence[Point], limit: int = DRAWN_POINTS) -> Sequence[Point]:
    """Return about `limit` points that look the same: the lowest and the highest in each part.

    Unlike an average or every n-th point, this keeps spikes.
    """
    if len(points) <= limit:
        return points
    parts = limit // 2
    bounds = [index * len(points) // parts for index in range(parts + 1)]
    kept = {0, len(points) - 1}
    for start, end in pairwise(bounds):
        part = range(start, end)
        kept |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def _curve(name: str, points: Iterable[Point]) -> Curve:
    finite: list[Point] = []
    broken: list[float] = []
    for step, value in points:
        if math.isfinite(value):
            finite.append((step, value))
        else:
            broken.append(step)
    return Curve(name, finite, broken)
