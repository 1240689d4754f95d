"""The logs of a run's ranks and agents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Final
from urllib.parse import urlencode

from steadytrain.components.pages.charts import spark_picture
from steadytrain.components.pages.html import html
from steadytrain.components.report.comparison import differences, results
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.figures import compared_figures
from steadytrain.components.report.report_page import content
from steadytrain.components.report.sentences import describe
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    TrainingStep,
    newest_attempt,
)
from steadytrain.components.shared.quantities import amount, size, timestamp
from steadytrain.components.shared.redaction import without_controls
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.decisions import Estimate, estimate
from steadytrain.pipelines.view.library import MOST_RUNS, Opened, Row, Sort
from steadytrain.pipelines.view.source import Source

SHOWN_BYTES: Final = 128 << 10


@dataclass(frozen=True)
class LogFile:
    """One log: its name in the run's folder, a title for people, and its size in bytes."""

    name: str
    title: str
    size: int


def log_files(source: Source, run: str) -> list[LogFile]:
    """Return the logs of a run, the newest attempt first."""
    files = [LogFile(name, _title(name), stamp.size) for name, stamp in source.logs(run).items()]
    return sorted(files, key=lambda item: (-_attempt(item.name), item.title))


def log_text(source: Source, run: str, name: str) -> tuple[str, bool]:
    """Return the end of a log, and whether it has more before that.

    Raises:
        BadInput: the run has no such log.
    """
    stamp = source.logs(run).get(name)
    if stamp is None:
        raise BadInput(f"run {run!r} has no log {name!r}", remedy="choose one on the run's page")
    start = max(0, stamp.size - SHOWN_BYTES)
    text = source.read(run, name, start, stamp.size).decode("utf-8", "replace")
    if start:
        text = text.partition("\n")[2]
    return without_controls(text), start > 0


def _attempt(name: str) -> int:
    return int(name.split("/")[1])


def _title(name: str) -> str:
    _, attempt, *others = name.split("/")
    return f"attempt {attempt}, {others[0].removesuffix('.log').replace('-', ' ')}"


_NEWEST_STEPS: Final = 50
"""How many of the newest training reports the measured speed is the median of."""


@dataclass(frozen=True)
class Comparison:
    """One prediction next to its measurement, in words."""

    name: str
    predicted: str
    measured: str
    difference: str


def predicted_and_measured(facts: Facts) -> list[Comparison]:
    """Return memory and speed of the newest attempt; "" stands for what is unknown."""
    newest = newest_attempt(facts.events)
    if newest is None:
        return []
    steps = [event for event in facts.of(TrainingStep) if event.attempt == newest.attempt]
    # A page must not import the module that a run's configuration names.
    named = ":" in str(facts.setting("data.task"))
    expected = None if named else _expected(facts.config_text, newest)
    return list(_compared(expected, steps))


def _compared(expected: Estimate | None, steps: list[TrainingStep]) -> Iterator[Comparison]:
    peak = steps[-1].gpu_memory_peak if steps else 0
    yield Comparison(
        "GPU memory of a rank",
        size(expected.memory) if expected else "",
        size(peak) if peak else "",
        f"{peak / expected.memory - 1:+.0%}" if expected and peak else "",
    )
    speeds = [event.tokens_per_second for event in steps[-_NEWEST_STEPS:]]
    speeds = [speed for speed in speeds if math.isfinite(speed)]
    measured = median(speeds) if speeds else 0.0
    span = expected.tokens_per_second if expected else None
    yield Comparison(
        "Tokens per second",
        f"{amount(span.low)} to {amount(span.high)}" if span else "",
        amount(measured) if measured else "",
        f"{measured / span.middle - 1:+.0%}" if span and measured else "",
    )


# A page is drawn again with every step, but the prediction changes with the attempt.
@lru_cache(maxsize=64)
def _predicted(text: str, device: str, nodes: int, plan: BatchPlan) -> Estimate | None:
    try:
        return estimate(load(text + "\n"), device, nodes, 0, plan)
    except BadInput:
        return None


def _expected(text: str, started: AttemptStarted) -> Estimate | None:
    batch = BatchPlan(started.batch, started.gradient_accumulation_steps, started.world_size)
    return _predicted(text, started.device, started.nodes, batch) if text else None


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
        iso=timestamp,
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
