"""Render an evaluation as one HTML page: metrics, classes, slices, worst examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import pyarrow as pa

from steadytrain.components.evaluate.landscape_chart import (
    LANDSCAPE_COLUMNS,
    landscape_chart,
    landscape_rows,
    landscape_words,
)
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.tasks.encoding.labeled_text import PAIR

_WORST = 10
_EXCERPT = 240
_TEXTS = ("text", PAIR, "completion")
"""Columns of test records with what the excerpts show."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .7rem; text-align: right;
  border-bottom: 1px solid #dde3e9; } th { font-weight: 600; } th:first-child, td:first-child,
  td.text { text-align: left; } td.text { font: 12px/1.4 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } .note { color: #5b6976; }
.chart { display: block; width: 100%; max-width: 32rem; } .chart text { fill: #5b6976;
  font-size: 11.5px; } .landscape path { fill: none; } .broken-point { stroke: #b3261e; }
  .contour { stroke-opacity: .7; }
"""


def evaluation_page(
    evaluation: EvaluationRecord, scores: pa.Table, records: pa.Table, *, title: str
) -> str:
    """Return the page as HTML.

    Args:
        scores: columns of `Scorer.score`, one row per record.
        records: the raw records in the same order. The page shows excerpts of their columns in
            _TEXTS.
    """
    parts = [
        f"<h1>Evaluation of {escape(title)}</h1>",
        f'<p class="note">{evaluation.examples:,} examples of the test side, '
        f"task {escape(evaluation.task)}.</p>",
        _metrics(evaluation),
        _robustness(evaluation),
        _tasks(evaluation),
        _classes(evaluation),
        _confusion(evaluation),
        _slices(evaluation),
        _landscape(evaluation),
        _worst(scores, records),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Evaluation of {escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>"
    )


def _metrics(evaluation: EvaluationRecord) -> str:
    rows = [
        [
            _plain(name),
            _number(item.value),
            f"{_number(item.low)} to {_number(item.high)}",
            _number(evaluation.baselines[name]) if name in evaluation.baselines else "",
        ]
        for name, item in evaluation.metrics.items()
    ]
    return _section("Metrics", ["metric", "value", "bootstrap interval", "baseline"], rows)


def _robustness(evaluation: EvaluationRecord) -> str:
    rows = [
        [
            f"{_plain(name)}, {_plain(condition)}",
            _number(item.value),
            f"{_number(item.low)} to {_number(item.high)}",
            "" if (plain := evaluation.unperturbed(name)) is None else _number(plain),
        ]
        for condition, metrics in evaluation.robustness.items()
        for name, item in metrics.items()
    ]
    return _section("Robustness", ["metric", "value", "bootstrap interval", "unperturbed"], rows)


def _tasks(evaluation: EvaluationRecord) -> str:
    rows = [
        [
            name,
            _number(score.value),
            "" if score.stderr is None else _number(score.stderr),
            _number(score.examples),
        ]
        for name, score in evaluation.tasks.items()
    ]
    return _section("lm-eval's tasks", ["metric", "value", "standard error", "documents"], rows)


def _classes(evaluation: EvaluationRecord) -> str:
    keys = ["precision", "recall", "f1", "support"]
    if any("threshold" in values for values in evaluation.per_class.values()):
        keys.append("threshold")
    rows = [
        [name, *(_number(values[key]) for key in keys)]
        for name, values in evaluation.per_class.items()
    ]
    return _section("Classes", ["label", *keys], rows)


def _confusion(evaluation: EvaluationRecord) -> str:
    rows = [
        [label, *map(str, counts)]
        for label, counts in zip(evaluation.labels, evaluation.confusion, strict=False)
    ]
    return _section(
        "Confusion: true labels down, predictions across", ["", *evaluation.labels], rows
    )


def _slices(evaluation: EvaluationRecord) -> str:
    names = list(dict.fromkeys(name for values in evaluation.slices.values() for name in values))
    rows = [
        [slice_name, *(_number(values[name]) if name in values else "" for name in names)]
        for slice_name, values in evaluation.slices.items()
    ]
    return _section("Slices", ["slice", *map(_plain, names)], rows)


def _landscape(evaluation: EvaluationRecord) -> str:
    found, missing = evaluation.landscape, evaluation.landscape_missing
    if found is None:
        note = f'<p class="note">{escape(missing)}</p>'
        return f"<h2>Loss landscape</h2>{note}" if missing else ""
    heading = "Loss by distance from the trained weights"
    rows = [(name, *values) for name, values in landscape_rows(found)]
    return (
        f"<h2>Loss landscape</h2>{landscape_chart(found)}"
        f'<p class="note">{landscape_words(found)}; {found.records:,} test records.</p>'
        + _section(heading, LANDSCAPE_COLUMNS, rows)
    )


def _worst(scores: pa.Table, records: pa.Table) -> str:
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
        found = [_number(scores.column(name)[row].as_py()) for name in numbers]
        shown = redact("\n".join(text[: _EXCERPT // len(given)] for text in given))
        rows.append([identity, slice_name, _number(float(mean[row])), *found, shown])
    headings = ["id", "slice", "loss a target", *numbers, "beginning of the text"]
    return _section("Worst examples", headings, rows, text_column=3 + len(numbers))


def _section(
    heading: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text_column: int | None = None,
) -> str:
    """Return a table under a heading, or "" if there are no rows."""
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if index == text_column else ''}>{escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    if not body:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return (
        f'<h2>{escape(heading)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"
