"""An evaluation and the gate as tables and figures: for the evaluation's page and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from steadytrain.components.pages.charts import Figure, share_chart
from steadytrain.components.pages.landscape_map import landscape_map, landscape_words
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import (
    EvaluationRecord,
    GateRecord,
    Interval,
    LandscapeRecord,
)

MATRIX_CLASSES: Final = 25
"""With more classes than this, a matrix is unreadable, so only the worst confusions are listed."""
_DIRECTIONS: Final = {True: "higher is better", False: "lower is better", None: ""}


def evaluation_section(record: EvaluationRecord, classes: int = MATRIX_CLASSES) -> dict[str, Any]:
    """Return metrics with intervals and baselines, lm-eval tasks, classes, confusions, slices.

    Args:
        classes: with more than these there is no confusion matrix.
    """
    baselines = {name: _baselines(record, name) for name in record.metrics}
    known = {name for found in baselines.values() for name in found}
    metrics = [
        (
            name,
            [
                number(metric.value),
                interval(metric),
                ", ".join(
                    f"{number(value)} {baseline.removesuffix(name).strip('_')}".strip()
                    for baseline, value in baselines[name].items()
                ),
            ],
        )
        for name, metric in record.metrics.items()
    ]
    metrics += [
        (name, ["", "", number(value)])
        for name, value in record.baselines.items()
        if name not in known
    ]
    return {
        "examples": number(record.examples),
        "metrics": metrics,
        "robustness": [
            (
                f"{name}, {condition.replace('_', ' ')}",
                [number(metric.value), interval(metric), number(record.unperturbed(name))],
            )
            for condition, metrics in record.robustness.items()
            for name, metric in metrics.items()
        ],
        "tasks": [
            (
                name,
                [
                    *map(number, (score.value, score.stderr, score.examples)),
                    _DIRECTIONS[score.greater_is_better],
                ],
            )
            for name, score in record.tasks.items()
        ],
        "figures": [*_calibration(record), *_precision_and_recall(record)],
        "landscape": _landscape(record.landscape) if record.landscape else None,
        "landscape_missing": record.landscape_missing,
        "classes": _table(record.per_class),
        "slices": _table(record.slices),
        "matrix": _matrix(record) if len(record.labels) <= classes else None,
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
    rows += [
        (f"Floor for {name}", number(value), "the worst value allowed")
        for name, value in record.floors.items()
    ]
    rows += [
        (f"Improvement in slice {name}", percent(value), "relative to the champion")
        for name, value in record.slices.items()
    ]
    return {
        "reason": record.reason,
        "rows": [(name, [value, note]) for name, value, note in rows],
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


def _table(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    return {
        "columns": [name.replace("_", " ") for name in columns],
        "rows": [
            (name, [number(values.get(column)) for column in columns])
            for name, values in rows.items()
        ],
    }


def _calibration(record: EvaluationRecord) -> Iterator[Figure]:
    if not record.calibration:
        return
    error = record.metrics.get("ece")
    said = "; ".join(
        f"{percent(item.confidence)} confidence, {percent(item.accuracy)} correct "
        f"({number(item.examples)} examples)"
        for item in record.calibration
    )
    points = [(item.confidence, item.accuracy) for item in record.calibration]
    ideal = [(0.0, 0.0), (1.0, 1.0)]
    chart = share_chart("Calibration", said, [points, ideal], "confidence")
    caption = "share of correct predictions by the model's confidence"
    if error is not None:
        caption += f"; expected calibration error {number(error.value)}"
    yield Figure("Calibration", chart, ["accuracy", "ideal"], caption)


def _precision_and_recall(record: EvaluationRecord) -> Iterator[Figure]:
    """Yield precision by recall of the classes with the worst results."""
    for label, points in record.curves.items():
        area = record.per_class.get(label, {}).get("average_precision")
        caption = f"precision by recall; average precision {number(area)}"
        title = f"Precision and recall: {label}"
        yield Figure(title, share_chart(title, caption, [points], "recall"), [], caption)


def _landscape(found: LandscapeRecord) -> dict[str, Any]:
    """Return the map of the loss around the trained weights, and its profile by distance."""
    caption = (
        f"{landscape_words(found)}. {number(found.records)} test records; the cross is the "
        f"trained model, and a step of 1 is as long as its weights, filter by filter."
    )
    chart = landscape_map(found)
    return {
        "figures": [Figure("Loss landscape", chart, [], caption)] if chart else [],
        "columns": ["Lowest loss", "Mean loss", "Highest loss", "Not finite"],
        "rows": [
            (
                number(ring.distance),
                [*map(number, (ring.lowest, ring.mean, ring.highest)), str(ring.not_finite or "")],
            )
            for ring in found.profile
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


def _confusions(record: EvaluationRecord, limit: int = 10) -> list[tuple[str, list[str]]]:
    """Return the most frequent mistakes: true class, predicted class, count."""
    pairs = [
        (count, true, predicted)
        for true, counts in enumerate(record.confusion)
        for predicted, count in enumerate(counts)
        if count and true != predicted
    ]
    pairs.sort(reverse=True)
    return [
        (record.labels[true], [record.labels[predicted], number(count)])
        for count, true, predicted in pairs[:limit]
    ]
