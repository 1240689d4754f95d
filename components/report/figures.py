"""Figures of training: the measures to draw, and their captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadytrain.components.pages.charts import Curve, Figure, line_chart
from steadytrain.components.report.curves import standing, training_curve, validation_curve
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.story import attempts
from steadytrain.components.shared.events.types import (
    NoiseScaleMeasured,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.quantities import number, size


def training_figures(facts: Facts) -> list[Figure]:
    """Return loss, other validation scores, learning rate, gradients, throughput and memory."""
    loss = training_curve(facts, "training", lambda event: event.loss)
    figures = [_figure(facts, "Loss", [loss, validation_curve(facts, "validation", "loss")])]
    figures += [
        _figure(facts, f"Validation {name}", [validation_curve(facts, name, name)])
        for name in _other_scores(facts)
    ]
    figures += [
        _figure(
            facts,
            "Learning rate",
            [training_curve(facts, "learning rate", lambda event: event.learning_rate)],
            from_zero=True,
        ),
        _figure(
            facts,
            "Gradient norm, before clipping",
            [training_curve(facts, "gradient norm", lambda event: event.grad_norm)],
            from_zero=True,
        ),
        _figure(
            facts,
            "Tokens per second",
            [training_curve(facts, "tokens/s", lambda event: event.tokens_per_second)],
            from_zero=True,
        ),
        _critical_batch_size(facts),
        _memory(facts),
    ]
    return [figure for figure in figures if figure.svg]


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


def _other_scores(facts: Facts) -> list[str]:
    """Return the validation metrics to draw besides the loss. Perplexity only repeats the loss."""
    names = dict.fromkeys(name for event in facts.of(Validated) for name in event.metrics)
    return [name for name in names if name not in ("loss", "perplexity", "weight")]


def _critical_batch_size(facts: Facts) -> Figure:
    """Draw the noise scale in sequences, and the global batch size next to it."""
    found = [
        (event.step, event.critical_batch_size)
        for event in standing(facts.of(NoiseScaleMeasured))
        if event.critical_batch_size is not None
    ]
    curves = [Curve("critical batch size", found)] if found else []
    size = facts.setting("training.global_batch_size")
    if found and isinstance(size, int):
        curves.append(Curve("global batch size", [(step, size) for step, _ in found]))
    return _figure(facts, "Critical batch size, in sequences", curves, from_zero=True)


def _memory(facts: Facts) -> Figure:
    curves = [training_curve(facts, "process", lambda event: event.memory_used)]
    if any(event.gpu_memory_used for event in facts.of(TrainingStep)):
        curves.append(training_curve(facts, "GPU", lambda event: event.gpu_memory_used))
    return _figure(facts, "Memory of rank 0", curves, in_bytes=True)


def _figure(
    facts: Facts,
    title: str,
    curves: Sequence[Curve],
    *,
    from_zero: bool = False,
    in_bytes: bool = False,
) -> Figure:
    show = size if in_bytes else number
    drawn = [curve for curve in curves if curve.points or curve.broken]
    marks = [
        (
            float(attempt.first_step),
            f"attempt {attempt.number} started at step {attempt.first_step}",
        )
        for attempt in attempts(facts)[1:]
    ]
    chart = line_chart(title, drawn, show=show, marks=marks, from_zero=from_zero or in_bytes)
    legend = [curve.name for curve in drawn] if len(drawn) > 1 else []
    return Figure(title, chart, legend, _caption(drawn, show), drawn)


def _caption(curves: Sequence[Curve], show: Any) -> str:
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
