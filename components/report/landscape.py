"""The loss around the trained weights, arranged for the page."""

from __future__ import annotations

from typing import Any

from steadytrain.components.evaluate.landscape_chart import (
    LANDSCAPE_COLUMNS,
    landscape_chart,
    landscape_rows,
    landscape_words,
)
from steadytrain.components.pages.charts import Figure
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.records import EvaluationRecord


def landscape_section(record: EvaluationRecord) -> dict[str, Any] | None:
    """Return the map and its profile by distance; None if it was not measured."""
    found = record.landscape
    if found is None:
        return None
    caption = (
        f"{landscape_words(found)}. {number(found.records)} test records; the cross is the "
        f"trained model, and a step of 1 is as long as its weights, filter by filter."
    )
    chart = landscape_chart(found)
    first, *columns = LANDSCAPE_COLUMNS
    return {
        "figures": [Figure("Loss landscape", chart, [], caption)] if chart else [],
        "first": first,
        "columns": columns,
        "rows": landscape_rows(found),
    }
