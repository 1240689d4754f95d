"""Curves of training: choose the points that count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from steadytrain.components.pages.charts import Curve, Point
from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.events.types import (
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)

E = TypeVar("E", TrainingStep, Validated, NoiseScaleMeasured)


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


def _curve(name: str, points: Iterable[Point]) -> Curve:
    finite: list[Point] = []
    broken: list[float] = []
    for step, value in points:
        if math.isfinite(value):
            finite.append((step, value))
        else:
            broken.append(step)
    return Curve(name, finite, broken)
