"""Figures of a classifier: its calibration, and precision and recall of each class."""

from __future__ import annotations

from steadytrain.components.pages.charts import Figure, share_chart
from steadytrain.components.shared.quantities import number, percent
from steadytrain.components.shared.records import EvaluationRecord


def class_figures(record: EvaluationRecord) -> list[Figure]:
    """Return calibration, and precision by recall of the classes with the worst results."""
    return [*_calibration(record), *_curves(record)]


def _calibration(record: EvaluationRecord) -> list[Figure]:
    if not record.calibration:
        return []
    error = record.metrics.get("ece")
    said = "; ".join(
        f"{percent(item.confidence)} confidence, {percent(item.accuracy)} correct "
        f"({number(item.examples)} examples)"
        for item in record.calibration
    )
    points = [(item.confidence, item.accuracy) for item in record.calibration]
    title = "Calibration"
    chart = share_chart(title, points, axis="confidence", about=said, ideal=True)
    caption = "share of correct predictions by the model's confidence"
    if error is not None:
        caption += f"; expected calibration error {number(error.value)}"
    return [Figure(title, chart, ["accuracy", "ideal"], caption)]


def _curves(record: EvaluationRecord) -> list[Figure]:
    figures = []
    for label, points in record.curves.items():
        area = record.per_class.get(label, {}).get("average_precision")
        caption = f"precision by recall; average precision {number(area)}"
        title = f"Precision and recall: {label}"
        chart = share_chart(title, points, axis="recall", about=caption)
        figures.append(Figure(title, chart, [], caption))
    return figures
