"""Several runs side by side: their curves, their results, and how their configurations differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from steadytrain.components.pages.charts import Curve, Figure, line_chart
from steadytrain.components.report.curves import training_curve, validation_curve
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.spending import Spending
from steadytrain.components.report.story import attempts
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.shared.quantities import duration, number, percent, size

_OF_EVERY_RUN: Final = {"run", "output"}
"""Fields that always differ, and say nothing."""


Row = tuple[str, Sequence[str]]
"""A name and its value in each run."""


def compared_figures(facts: Sequence[Facts]) -> list[Figure]:
    """Return a figure for each measure, with a curve for each run."""
    by_step: dict[str, Callable[[TrainingStep], float]] = {
        "Training loss": lambda event: event.loss,
        "Learning rate": lambda event: event.learning_rate,
        "Gradient norm, before clipping": lambda event: event.grad_norm,
        "Tokens per second": lambda event: event.tokens_per_second,
    }
    figures = [
        _figure(title, [training_curve(item, _name(item), value) for item in facts])
        for title, value in by_step.items()
    ]
    memory = [training_curve(item, _name(item), _memory) for item in facts]
    figures.insert(1, _figure("Validation loss", _validations(facts)))
    figures.append(_figure("Memory of rank 0", memory, show=size))
    return [figure for figure in figures if figure.svg]


def results(facts: Sequence[Facts], states: Sequence[str]) -> list[Row]:
    """Return what each run has reached; "" stands for what is unknown.

    Args:
        states: the state of each run.
    """
    columns = [
        {"State": state, **dict(_results(item))} for item, state in zip(facts, states, strict=True)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def differences(facts: Sequence[Facts]) -> list[Row]:
    """Return the fields of the configuration that are not the same in all runs."""
    flat = [
        {name: text for name, text in leaves(item.config) if name not in _OF_EVERY_RUN}
        for item in facts
    ]
    return differing(flat)


def differing(runs: Sequence[Mapping[str, str]]) -> list[Row]:
    """Return rows of a name and its value in each run, without those that are the same."""
    names = sorted({name for fields in runs for name in fields})
    rows: list[Row] = [(name, [fields.get(name, "(not set)") for fields in runs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def leaves(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field by its dotted name, with its value as text."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:
        return "a number that is too long to show"


def tokens(facts: Facts) -> int:
    """Return how many tokens all attempts have processed, including those of repeated steps."""
    return sum({event.attempt: event.tokens for event in facts.of(TrainingStep)}.values())


def _name(facts: Facts) -> str:
    return facts.workspace.run_id


def _memory(event: TrainingStep) -> float:
    return event.gpu_memory_used or event.memory_used


def _validations(facts: Sequence[Facts]) -> list[Curve]:
    return [validation_curve(item, _name(item), "loss") for item in facts]


def _figure(title: str, curves: Sequence[Curve], show: Callable[[float], str] = number) -> Figure:
    # A run without points keeps its color in the other figures.
    chart = line_chart(title, curves, show=show)
    return Figure(title, chart, [curve.name for curve in curves], "", curves)


def _results(facts: Facts) -> Iterator[tuple[str, str]]:
    if steps := facts.of(TrainingStep):
        yield "Step", number(steps[-1].step)
        yield "Training loss", number(steps[-1].loss)
        yield "Tokens", number(tokens(facts))
        yield "Tokens per second", number(round(steps[-1].tokens_per_second))
        yield "Memory of rank 0", size(_memory(steps[-1]))
    if scores := facts.of(Validated):
        best = next((event for event in reversed(scores) if event.best), scores[-1])
        for name, score in best.metrics.items():
            yield f"Best validation: {name}", number(score)
    if facts.evaluation:
        for name, metric in facts.evaluation.metrics.items():
            yield f"Test {name}", number(metric.value)
    if tried := attempts(facts):
        yield "Attempts", number(len(tried))
    spending = Spending.of(facts)
    if spending.times.wall:
        yield "Training time", duration(spending.times.wall)
        yield "Goodput", percent(spending.times.goodput)
    if spending.price_per_hour is not None:
        yield "Cost", f"{spending.times.cost(spending.price_per_hour):,.2f} USD"
