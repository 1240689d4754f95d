"""Runs in a terminal: a table of all, or one run in detail, drawn again until a key ends it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Final, get_args

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from steadytrain.components.observe.diagnosis import findings
from steadytrain.components.pages.charts import spark_line
from steadytrain.components.report.explain import recoveries
from steadytrain.components.report.facts import Spending
from steadytrain.components.report.figures import memory, without_repeats
from steadytrain.components.report.sentences import describe
from steadytrain.components.report.story import attempts
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.shared.quantities import amount, duration, moment, number, size
from steadytrain.components.shared.redaction import on_one_line, redact
from steadytrain.pipelines.view.library import Board, Library, Opened, Row, Sort

_WIDE: Final = 60
_WIDE_ENOUGH: Final = 120
"""Columns of a terminal from which on all columns of the table fit."""
_NEWEST: Final = 8
"""How many attempts, recoveries and events of a run are shown."""
_AROUND: Final = 4
"""Lines of the terminal that the table's header and footer take."""
_STYLES: Final = {
    "running": "bold blue", "finished": "green", "failed": "red", "unfinished": "yellow",
    "stopped": "yellow", "resubmitted": "yellow", "pending": "blue", "terminated": "yellow",
}  # fmt: skip
_LEVELS: Final = {"info": "", "warn": "yellow", "error": "red", "fatal": "bold red"}


def runs_table(board: Board, sort: Sort, limit: int, width: int) -> RenderableType:
    """Return a table of the first `limit` runs. A narrow terminal gets fewer columns."""
    rows = board.rows(sort)
    if not rows:
        return Text(f"no runs in {board.source.uri}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "curve", "tokens/s", "memory", "attempts"):
        table.add_column(name, justify="left" if name == "curve" else "right", no_wrap=True)
    if width >= _WIDE_ENOUGH:
        table.add_column("decision", no_wrap=True, overflow="ellipsis", ratio=1)
    for run in rows[:limit]:
        table.add_row(*_cells(board.row(run), width))
    left = len(rows) - limit
    more = [Text(f"and {left} more; --limit shows more", "dim")] if left > 0 else []
    return Group(table, *more)


def run_details(opened: Opened) -> RenderableType:
    """Return one run: curves, attempts, decisions, problems, time and cost, and newest events."""
    row, facts = opened.row, opened.facts
    of = f" of {number(row.max_steps)}" if row.max_steps else ""
    at = f", step {number(row.step)}{of}" if row.step is not None else ""
    parts: list[RenderableType] = [
        Text.assemble((row.run, "bold"), " ", _state(row), _plain(f" {row.stage}{at}")),
        _plain(row.summary),
    ]
    steps, scores = without_repeats(facts.of(TrainingStep)), without_repeats(facts.of(Validated))
    curves = Table(box=None, pad_edge=False, show_header=False)
    if steps:
        last = steps[-1]
        used = list(map(memory, steps))
        validation = [event.metrics["loss"] for event in scores if "loss" in event.metrics]
        for name, values, shown in (
            ("loss", [event.loss for event in steps], number(last.loss)),
            ("validation loss", validation, number(validation[-1]) if validation else ""),
            ("tokens/s", [event.tokens_per_second for event in steps], _speed(row)),
            ("memory", used, size(used[-1])),
        ):
            curves.add_row(name, Text(spark_line(values, _WIDE), "blue"), shown)
        parts.append(curves)
    if tried := attempts(facts):
        table = Table("attempt", "outcome", "steps", "took", box=None, pad_edge=False)
        for item in tried[-_NEWEST:]:
            table.add_row(
                number(item.number),
                item.outcome.replace("_", " "),
                f"{number(item.first_step)} to {number(item.last_step)}",
                duration(item.seconds),
            )
        parts += [Text(), table]
    parts += [_plain(line) for line in recoveries(facts.history)[-_NEWEST:]]
    parts += [_plain(str(item), _LEVELS["warn"]) for item in findings(facts.events)]
    parts += [_plain(line) for line in Spending.of(facts).lines()]
    described = [(event, text) for event in facts.events if (text := describe(event))]
    parts.append(Text())
    parts += [
        _plain(f"{moment(event.time)} {text}", _LEVELS[event.severity])
        for event, text in described[-_NEWEST:]
    ]
    return Group(*parts)


def show_runs(board: Board, sort: Sort, limit: int, console: Console) -> None:
    """Show the runs once, or on a terminal until q is pressed; s changes the order."""
    if not console.is_terminal:
        console.print(runs_table(board, sort, limit, console.width))
        return
    order = list(get_args(Sort))

    def draw() -> RenderableType:
        fitting = min(limit, max(1, console.height - _AROUND))
        hint = f"sorted by {order[0]}; s: other order, q: quit"
        return Group(runs_table(board, order[0], fitting, console.width), Text(hint, "dim"))

    while order[0] != sort:
        order.append(order.pop(0))
    for key in _drawn(draw, console, board.source.refresh_seconds):
        if key == "s":
            order.append(order.pop(0))


def show_run(library: Library, run: str, console: Console) -> None:
    """Show one run once, or on a terminal until q is pressed."""
    if not console.is_terminal:
        console.print(run_details(library.open(run)))
        return

    def draw() -> RenderableType:
        return Group(run_details(library.open(run)), Text("q: quit", "dim"))

    for _ in _drawn(draw, console, library.source.refresh_seconds):
        pass


def _drawn(draw: Callable[[], RenderableType], console: Console, seconds: float) -> Iterator[str]:
    """Draw every few seconds until q is pressed. Yield every other key, and draw again."""
    with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        key = ""
        while key != "q":
            live.update(draw(), refresh=True)
            key = wait(seconds)
            if key:
                yield key


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys. Yields a function that waits for one, and returns "" if none came."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _key(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return ""
    # Nothing to read means that the terminal is gone.
    return os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace")[:1] or "q"


def _cells(row: Row, width: int) -> list[RenderableType]:
    is_wide = width >= _WIDE_ENOUGH
    of = f"/{amount(row.max_steps)}" if row.max_steps else ""
    cells: list[RenderableType] = [
        row.run,
        Text.assemble(_state(row), _plain(f" {row.stage}" if is_wide else "")),
        f"{amount(row.step)}{of}" if row.step is not None else "",
        number(row.loss),
        Text(spark_line(row.losses, 24 if is_wide else 12), "blue"),
        _speed(row),
        size(row.memory) if row.memory else "",
        str(row.attempts or ""),
    ]
    return [*cells, _plain(row.decision)] if is_wide else cells


def _state(row: Row) -> Text:
    return Text(row.state, _STYLES.get(row.state, ""))


def _speed(row: Row) -> str:
    return "" if row.tokens_per_second is None else amount(row.tokens_per_second)


def _plain(text: str, style: str = "") -> Text:
    """Return text from a run: one line without secrets and without a terminal's control codes."""
    return Text(redact(on_one_line(text)), style)
