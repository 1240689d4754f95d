"""Evaluation and gate, arranged for the page."""

from __future__ import annotations

from typing import Any

from steadytrain.components.report.class_figures import class_figures
from steadytrain.components.report.landscape import landscape_section
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import EvaluationRecord, GateRecord, Interval

MATRIX_CLASSES = 25
"""With more classes than this, a matrix is unreadable, so only the worst confusions are listed."""
_DIRECTIONS = {True: "higher is better", False: "lower is better", None: ""}


def evaluation_section(record: EvaluationRecord) -> dict[str, Any]:
    """Return metrics with intervals and baselines, lm-eval tasks, classes, confusions, slices."""
    columns = list(dict.fromkeys(name for row in record.per_class.values() for name in row))
    slice_columns = list(dict.fromkeys(name for row in record.slices.values() for name in row))
    baselines = {name: _baselines(record, name) for name in record.metrics}
    shown = {name for found in baselines.values() for name in found}
    return {
        "examples": number(record.examples),
        "metrics": [
            {
                "name": name,
                "value": number(metric.value),
                "interval": interval(metric),
                "baseline": ", ".join(
                    f"{number(value)} {baseline.removesuffix(name).strip('_')}".strip()
                    for baseline, value in baselines[name].items()
                ),
            }
            for name, metric in record.metrics.items()
        ],
        "robustness": [
            (
                f"{name}, {condition.replace('_', ' ')}",
                number(metric.value),
                interval(metric),
                number(record.unperturbed(name)),
            )
            for condition, metrics in record.robustness.items()
            for name, metric in metrics.items()
        ],
        "tasks": [
            (
                name,
                number(score.value),
                number(score.stderr),
                number(score.examples),
                _DIRECTIONS[score.greater_is_better],
            )
            for name, score in record.tasks.items()
        ],
        "other_baselines": [
            (name, number(value)) for name, value in record.baselines.items() if name not in shown
        ],
        "figures": class_figures(record),
        "landscape": landscape_section(record),
        "landscape_missing": record.landscape_missing,
        "classes": _table(record.per_class, columns),
        "slices": _table(record.slices, slice_columns),
        "matrix": _matrix(record) if len(record.labels) <= MATRIX_CLASSES else None,
        "confusions": _confusions(record),
    }


def gate_section(record: GateRecord) -> dict[str, Any]:
    """Return the decision with all its numbers."""
    direction = "higher" if record.greater_is_better else "lower"
    rows = [(f"Candidate's {record.metric}", number(record.candidate), f"{direction} is better")]
    if record.champion is not None:
        against = f"version {record.champion_version}, on the same records"
        rows.append((f"Champion's {record.metric}", number(record.champion), against))
    elif record.champion_version is not None:
        rows.append(("Champion", f"version {record.champion_version}", "not compared"))
    else:
        rows.append(("Champion", "none", "the baseline and the floors decide"))
    if record.improvement is not None:
        low, high = percent(record.improvement.low), percent(record.improvement.high)
        rows.append(("Improvement", percent(record.improvement.value), f"{low} to {high}"))
    for item in record.comparisons:
        ends = f"{percent(item.improvement.low)} to {percent(item.improvement.high)}"
        value = percent(item.improvement.value)
        rows.append((f"Improvement over {item.what}", value, f"{ends}, by {item.metric}"))
    if record.base_not_compared:
        rows.append(("Improvement over model.base", "not compared", record.base_not_compared))
    if record.units:
        noun = "model was" if record.earlier == 1 else "models were"
        rows.append(
            (
                "Test examples",
                number(record.units),
                f"independent ones; {number(record.earlier)} other {noun} judged on them before",
            )
        )
        rows.append(("Level of the intervals", percent(record.confidence), "after the corrections"))
    rows.append(
        ("Required margin", percent(record.margin), "which the interval's lower end must exceed")
    )
    return {
        "promoted": record.promoted,
        "reason": record.reason,
        "rows": rows,
        "floors": [(name, number(value)) for name, value in record.floors.items()],
        "slices": [(name, percent(value)) for name, value in record.slices.items()],
    }


def interval(metric: Interval) -> str:
    """Format a confidence interval."""
    return f"{number(metric.low)} to {number(metric.high)}"


def _baselines(record: EvaluationRecord, metric: str) -> dict[str, float]:
    """Return a metric's baselines. Their names are the metric's or end in it, like unigram_loss."""
    return {
        name: value
        for name, value in record.baselines.items()
        if name == metric or name.endswith(f"_{metric}")
    }


def _table(rows: dict[str, dict[str, float]], columns: list[str]) -> dict[str, Any]:
    return {
        "columns": columns,
        "rows": [
            (name, [number(values.get(column)) for column in columns])
            for name, values in rows.items()
        ],
    }


def _matrix(record: EvaluationRecord) -> dict[str, Any] | None:
    """Return counts, with each cell's share of its true class for the color."""
    if not record.confusion:
        return None
    rows = []
    for label, counts in zip(record.labels, record.confusion, strict=False):
        total = sum(counts) or 1
        rows.append((label, [(number(count), round(count / total, 3)) for count in counts]))
    return {"labels": record.labels, "rows": rows}


def _confusions(record: EvaluationRecord, limit: int = 10) -> list[tuple[str, str, str]]:
    """Return the most frequent mistakes: true class, predicted class, count."""
    pairs = [
        (count, true, predicted)
        for true, counts in enumerate(record.confusion)
        for predicted, count in enumerate(counts)
        if count and true != predicted
    ]
    pairs.sort(reverse=True)
    return [
        (record.labels[true], record.labels[predicted], number(count))
        for count, true, predicted in pairs[:limit]
    ]
