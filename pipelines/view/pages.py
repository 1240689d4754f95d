"""The pages as HTML.

Run names, messages and logs may be hostile, and may hold secrets: every text is escaped, and has
its secrets replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from steadytrain.components.pages.charts import Curve, spark_picture, thin
from steadytrain.components.report.compare.side_by_side import (
    compared_figures,
    differences,
    results,
)
from steadytrain.components.report.page import content
from steadytrain.components.report.sentences import amount, describe
from steadytrain.components.shared.controls import without_controls
from steadytrain.components.shared.quantities import duration, moment, number, size
from steadytrain.components.shared.redaction import redact
from steadytrain.pipelines import json_output
from steadytrain.pipelines.view.board import Row, Sort
from steadytrain.pipelines.view.library import MOST_RUNS, Opened
from steadytrain.pipelines.view.measures import predicted_and_measured
from steadytrain.pipelines.view.rank_logs import LogFile

ROWS: Final = 50
"""Rows of a page of the list."""
COLUMNS: Final[Mapping[Sort, str]] = {
    "run": "Run",
    "state": "State",
    "step": "Step",
    "loss": "Loss",
    "speed": "Tokens/s",
    "memory": "Memory",
    "attempts": "Attempts",
    "active": "Last event",
}
NEWEST_EVENTS: Final = 60
TABLE_ROWS: Final = 24


def list_page(
    uri: str, rows: Sequence[Row], *, sort: Sort, words: str, page: int, total: int
) -> str:
    """Return the list of runs.

    Args:
        rows: the runs of this page.
        words: what the names have to contain.
        page: counted from 1.
        total: how many runs there are on all pages.
    """
    pages = max(1, math.ceil(total / ROWS))

    def link(**changed: str | int) -> str:
        given = {"sort": sort, "q": words, "page": 1} | changed
        return "?" + urlencode({name: value for name, value in given.items() if value})

    return _render(
        "list.html.j2",
        uri=uri,
        title="Runs",
        rows=rows,
        columns=COLUMNS,
        sort=sort,
        words=words,
        page=page,
        pages=pages,
        total=total,
        link=link,
        most=MOST_RUNS,
    )


def run_page(uri: str, opened: Opened, logs: Sequence[LogFile]) -> str:
    """Return the page of one run."""
    row, facts = opened.row, opened.facts
    shown = [event for event in facts.events if describe(event)][-NEWEST_EVENTS:]
    return _render(
        "run.html.j2",
        uri=uri,
        title=row.run,
        row=row,
        **content(facts),
        predicted=predicted_and_measured(facts),
        logs=logs,
        events=[(event, describe(event)) for event in reversed(shown)],
        is_sample=opened.is_sample,
        unread=opened.unread,
    )


def log_page(uri: str, run: str, log: LogFile, text: str, *, is_cut: bool) -> str:
    """Return the end of a log."""
    return _render(
        "log.html.j2", uri=uri, title=f"{log.title} of {run}", run=run, log=log, text=text,
        is_cut=is_cut,
    )  # fmt: skip


def compare_page(uri: str, opened: Sequence[Opened]) -> str:
    """Return several runs side by side."""
    facts = [item.facts for item in opened]
    return _render(
        "compare.html.j2",
        uri=uri,
        title="Compare " + ", ".join(item.workspace.run_id for item in facts),
        runs=[item.workspace.run_id for item in facts],
        figures=compared_figures(facts),
        results=results(facts, [item.row.state for item in opened]),
        differences=differences(facts),
    )


def message_page(uri: str, title: str, message: str, remedy: str = "") -> str:
    """Return a page that says what is wrong, and how to go on."""
    return _render("message.html.j2", uri=uri, title=title, message=message, remedy=remedy)


def login_page(uri: str, *, failed: bool) -> str:
    """Return the page that asks for the token."""
    return _render("login.html.j2", uri=uri, title="Token", failed=failed)


def table_of(curves: Sequence[Curve]) -> list[tuple[str, list[str]]]:
    """Return curves as rows of a step and each curve's value there, a few of all steps."""
    values = [dict(curve.points) for curve in curves]
    steps = sorted({step for points in values for step in points})
    kept = thin([(step, float(index)) for index, step in enumerate(steps)], TABLE_ROWS)
    return [
        (number(step), [number(points[step]) if step in points else "" for points in values])
        for step, _ in kept
    ]


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def _fit_to_show(value: object) -> object:
    """Return what a page may show: a message or a log may hold secrets and a terminal's codes."""
    return redact(without_controls(value)) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("steadytrain.pipelines.view", "."),
        autoescape=True,
        finalize=_fit_to_show,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "duration": duration, "moment": moment, "amount": amount, "size": size,
        "iso": json_output.moment, "spark": spark_picture, "table_of": table_of,
    }  # fmt: skip
    return environment
