"""Figures of training: of one run, and of several runs in comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from steadytrain.components.pages.charts import Curve, Figure, Format, Point, line_chart
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.story import attempts
from steadytrain.components.shared.events.types import (
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.quantities import number, size

E = TypeVar("E", TrainingStep, Validated, NoiseScaleMeasured)
_Measure = Callable[[TrainingStep], float]
_MEASURES: Final[Sequence[tuple[str, str, _Measure]]] = (
    ("Learning rate", "learning rate", lambda event: event.learning_rate),
    ("Gradient norm, before clipping", "gradient norm", lambda event: event.grad_norm),
    ("Tokens per second", "tokens/s", lambda event: event.tokens_per_second),
)
"""Title of the figure, name of the curve, and value."""


def training_figures(facts: Facts) -> list[Figure]:
    """Return loss, other validation scores, learning rate, gradients, throughput and memory."""
    marks = [
        (float(item.first_step), f"attempt {item.number} started at step {item.first_step}")
        for item in attempts(facts)[1:]
    ]

    def figure(
        title: str, curves: Sequence[Curve], show: Format = number, *, from_zero: bool = True
    ) -> Figure:
        drawn = [curve for curve in curves if curve.points or curve.broken]
        chart = line_chart(title, drawn, show=show, marks=marks, from_zero=from_zero)
        legend = [curve.name for curve in drawn] if len(drawn) > 1 else []
        return Figure(title, chart, legend, _caption(drawn, show), drawn)

    loss = [_training(facts, "training", lambda event: event.loss), _validation(facts, "loss")]
    figures = [figure("Loss", loss, from_zero=False)]
    figures += [
        figure(f"Validation {name}", [_validation(facts, name, name)], from_zero=False)
        for name in _other_scores(facts)
    ]
    figures += [figure(title, [_training(facts, name, value)]) for title, name, value in _MEASURES]
    figures += [
        figure("Critical batch size, in sequences", _critical_batch_size(facts)),
        figure("Memory of rank 0", _memory(facts), size),
    ]
    return [figure for figure in figures if figure.svg]


def compared_figures(facts: Sequence[Facts]) -> list[Figure]:
    """Return a figure for each measure, with a curve for each run."""
    names = [item.workspace.run_id for item in facts]

    def figure(
        title: str, value: _Measure | None, show: Format = number, *, from_zero: bool = True
    ) -> Figure:
        curves = [
            _training(item, name, value) if value else _validation(item, "loss", name)
            for item, name in zip(facts, names, strict=True)
        ]
        # A run without points keeps its color in the other figures.
        chart = line_chart(title, curves, show=show, from_zero=from_zero)
        return Figure(title, chart, names, "", curves)

    figures = [
        figure("Training loss", lambda event: event.loss, from_zero=False),
        figure("Validation loss", None, from_zero=False),
        *(figure(title, value) for title, _, value in _MEASURES),
        figure("Memory of rank 0", memory, size),
    ]
    return [figure for figure in figures if figure.svg]


def memory(event: TrainingStep) -> float:
    """Return the memory that a rank uses on its device, or else in its process."""
    return event.gpu_memory_used or event.memory_used


def validation_rows(facts: Facts, limit: int = 30) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the newest validations as a table: its columns, and rows of a step and its scores."""
    events = standing(facts.of(Validated))[-limit:]
    names = list(dict.fromkeys(name for event in events for name in event.metrics))
    rows = [
        (
            number(event.step),
            [
                *(number(event.metrics.get(name)) for name in names),
                "best so far" if event.best else "",
            ],
        )
        for event in events
    ]
    return [*names, ""], rows


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


def _training(facts: Facts, name: str, value: _Measure) -> Curve:
    """Return a measure of the training steps that count."""
    return _curve(name, ((event.step, value(event)) for event in standing(facts.of(TrainingStep))))


def _validation(facts: Facts, metric: str, name: str = "validation") -> Curve:
    """Return a validation score by step."""
    events = standing(facts.of(Validated))
    return _curve(
        name, ((event.step, event.metrics[metric]) for event in events if metric in event.metrics)
    )


def _curve(name: str, points: Iterable[Point]) -> Curve:
    finite: list[Point] = []
    broken: list[float] = []
    for step, value in points:
        if math.isfinite(value):
            finite.append((step, value))
        else:
            broken.append(step)
    return Curve(name, finite, broken)


def _other_scores(facts: Facts) -> list[str]:
    """Return the validation metrics to draw besides the loss. Perplexity only repeats the loss."""
    names = dict.fromkeys(name for event in facts.of(Validated) for name in event.metrics)
    return [name for name in names if name not in ("loss", "perplexity", "weight")]


def _critical_batch_size(facts: Facts) -> list[Curve]:
    """Return the noise scale in sequences, and the global batch size next to it."""
    found = [
        (event.step, event.critical_batch_size)
        for event in standing(facts.of(NoiseScaleMeasured))
        if event.critical_batch_size is not None
    ]
    curves = [Curve("critical batch size", found)] if found else []
    size = facts.setting("training.global_batch_size")
    if found and isinstance(size, int):
        curves.append(Curve("global batch size", [(step, size) for step, _ in found]))
    return curves


def _memory(facts: Facts) -> list[Curve]:
    curves = [_training(facts, "process", lambda event: event.memory_used)]
    if any(event.gpu_memory_used for event in facts.of(TrainingStep)):
        curves.append(_training(facts, "GPU", lambda event: event.gpu_memory_used))
    return curves


def _caption(curves: Sequence[Curve], show: Format) -> str:
    said = [
        f"{curve.name} {show(curve.points[-1][1])} at step {number(curve.points[-1][0])}"
        for curve in curves
        if curve.points
    ]
    said += [
        f"{curve.name} not finite at {len(curve.broken)} logged steps (red)"
        for curve in curves
        if curve.broken
    ]
    return "; ".join(said)
