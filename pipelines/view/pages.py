"""What each page of the application shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlencode

from steadytrain.components.pages.charts import spark_picture
from steadytrain.components.pages.html import html
from steadytrain.components.report.compare.side_by_side import (
    differences,
    results,
)
from steadytrain.components.report.figures import compared_figures
from steadytrain.components.report.report_page import content
from steadytrain.components.report.sentences import describe
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

    return html(
        "ui/list",
        uri=uri,
        title="Runs",
        live="",
        rows=rows,
        columns=COLUMNS,
        sort=sort,
        words=words,
        page=page,
        pages=pages,
        total=total,
        link=link,
        most=MOST_RUNS,
        spark=spark_picture,
        iso=json_output.moment,
    )


def run_page(uri: str, opened: Opened, logs: Sequence[LogFile]) -> str:
    """Return the page of one run."""
    row, facts = opened.row, opened.facts
    shown = [event for event in facts.events if describe(event)][-NEWEST_EVENTS:]
    return html(
        "ui/run",
        uri=uri,
        title=row.run,
        live=urlencode({"run": row.run}),
        row=row,
        **content(facts),
        predicted=[
            (one.name, [one.predicted or "unknown", one.measured or "unknown", one.difference])
            for one in predicted_and_measured(facts)
        ],
        logs=logs,
        events=[(event, describe(event)) for event in reversed(shown)],
        is_sample=opened.is_sample,
        unread=opened.unread,
    )


def log_page(uri: str, run: str, log: LogFile, text: str, *, is_cut: bool) -> str:
    """Return the end of a log."""
    return html(
        "ui/log",
        uri=uri,
        title=f"{log.title} of {run}",
        live=urlencode({"run": run}),
        run=run,
        log=log,
        text=text,
        is_cut=is_cut,
    )


def compare_page(uri: str, opened: Sequence[Opened]) -> str:
    """Return several runs side by side."""
    facts = [item.facts for item in opened]
    runs = [item.workspace.run_id for item in facts]
    return html(
        "ui/compare",
        uri=uri,
        title="Compare " + ", ".join(runs),
        live=urlencode({"run": runs}, doseq=True),
        runs=runs,
        figures=compared_figures(facts),
        results=results(facts, [item.row.state for item in opened]),
        differences=differences(facts),
    )


def message_page(uri: str, title: str, message: str, remedy: str = "") -> str:
    """Return a page that says what is wrong, and how to go on."""
    return html("ui/message", uri=uri, title=title, message=message, remedy=remedy)


def login_page(uri: str, *, failed: bool) -> str:
    """Return the page that asks for the token."""
    return html("ui/login", uri=uri, title="Token", failed=failed)
