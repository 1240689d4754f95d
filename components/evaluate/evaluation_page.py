"""An evaluation as one page: its scores, and the examples that were worst."""

from __future__ import annotations

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
        worst=_worst(scores, records),
    )


def _worst(scores: pa.Table, records: pa.Table) -> dict[str, Any]:
    loss = np.asarray(scores.column("loss").to_numpy())
    targets = np.asarray(scores.column("targets").to_numpy())
    mean = loss / np.maximum(targets, 1)
    chosen = np.argsort(-mean, kind="stable")[:_WORST]
    columns = [name for name in _TEXTS if name in records.column_names]
    texts = records.select(columns).take(chosen).to_pylist()
    numbers = [name for name in ("target", "predicted") if name in scores.column_names]
    rows = []
    for place, row in enumerate(map(int, chosen)):
        given = [texts[place][name] for name in columns if texts[place][name]]
        identity = str(scores.column("id")[row])[:12]
        slice_name = scores.column("slice")[row].as_py() or ""
        found = [number(scores.column(name)[row].as_py()) for name in numbers]
        # Secrets are replaced before a text is cut, because a part of one is not recognized.
        shown = "\n".join(text[: _EXCERPT // len(given)] for text in map(redact, given))
        rows.append((identity, [slice_name, number(float(mean[row])), *found, shown]))
    return {"columns": ["Slice", "Loss a target", *numbers, "Beginning of the text"], "rows": rows}
