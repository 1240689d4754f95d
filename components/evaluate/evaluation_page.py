"""An evaluation as one page: its scores, and the examples that were worst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from steadytrain.components.pages.evaluation_section import evaluation_section
from steadytrain.components.pages.html import html
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.tasks.encoding.labeled_text import PAIR

_WORST: Final = 10
_EXCERPT: Final = 240
_ANSWERS: Final = {
    "target": "True",
    "label": "True",
    "labels": "True",
    "predicted": "Predicted",
    "prediction": "Predicted",
    "predictions": "Predicted",
}
_TEXTS: Final = ("text", PAIR, "completion")
"""Columns of test records with what the excerpts show."""


def evaluation_page(
    evaluation: EvaluationRecord, scores: pa.Table, records: pa.Table, *, title: str
) -> str:
    """Return the page as HTML.

    Args:
        scores: columns of `Scorer.score`, one row per record.
        records: the raw records in the same order. The page shows excerpts of their columns in
            _TEXTS.
    """
    return html(
        "evaluation",
        kind="evaluation",
        name=title,
        task=evaluation.task,
        evaluation=evaluation_section(evaluation, classes=len(evaluation.labels)),
        worst=_worst(scores, records, evaluation.labels),
    )


def _worst(scores: pa.Table, records: pa.Table, labels: Sequence[str]) -> dict[str, Any]:
    loss = np.asarray(scores.column("loss").to_numpy())
    targets = np.asarray(scores.column("targets").to_numpy())
    mean = loss / np.maximum(targets, 1)
    chosen = np.argsort(-mean, kind="stable")[:_WORST]
    columns = [name for name in _TEXTS if name in records.column_names]
    texts = records.select(columns).take(chosen).to_pylist()
    known = [name for name in _ANSWERS if name in scores.column_names]
    rows = []
    for place, row in enumerate(map(int, chosen)):
        given = [texts[place][name] for name in columns if texts[place][name]]
        identity = str(scores.column("id")[row])[:12]
        slice_name = scores.column("slice")[row].as_py() or ""
        found = [_answer(scores.column(name)[row].as_py(), labels) for name in known]
        # Secrets are replaced before a text is cut, because a part of one is not recognized.
        shown = "\n".join(text[: _EXCERPT // len(given)] for text in map(redact, given))
        rows.append((identity, [slice_name, number(float(mean[row])), *found, shown]))
    answers = [_ANSWERS[name] for name in known]
    return {"columns": ["Slice", "Loss a target", *answers, "Beginning of the text"], "rows": rows}


def _answer(value: Any, labels: Sequence[str]) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    indices = value if isinstance(value, list) else [value]
    return ", ".join(labels[index] if labels else str(index) for index in indices) or "no label"
