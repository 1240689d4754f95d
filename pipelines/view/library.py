"""What all open pages share: the list of runs with a few figures each, and the runs on pages."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from steadytrain.components.pages.charts import thin
from steadytrain.components.report.facts import Facts
from steadytrain.components.report.figures import without_repeats
from steadytrain.components.report.story import RunState, RunSummary, executions, latest, outcome
from steadytrain.components.shared.config.run import RUN_NAME
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptStarted,
    DecisionMade,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.quantities import timestamp
from steadytrain.pipelines.view.reader import BRIEF, FULL, RunReader, brief, full
from steadytrain.pipelines.view.source import Source, Stamp

Sort = Literal["active", "run", "state", "step", "loss", "speed", "memory", "attempts"]
LOOK_SECONDS: Final = 1.0
SPARK_POINTS: Final = 24
_ORDER: Final[Sequence[RunState]] = (
    *("running", "pending", "failed", "unfinished", "resubmitted"),
    *("terminated", "stopped", "finished", "unchanged", "empty"),
)
_MAY_BE_RUNNING: Final = {"unfinished", "empty", "stopped"}


@dataclass(frozen=True)
class Row:
    """One run in a list. None means unknown, or not reached.

    state, summary: how the run is doing, in a word and in a sentence.
    stage: the step of the pipeline that it last reached.
    active: when it last wrote an event, in seconds since the epoch.
    losses: training loss, thinned out; finite values only.
    tokens_per_second: of all ranks together.
    memory: bytes that rank 0 uses on its device, or on a CPU in its process.
    decision: what the supervisor last decided after a failure; "" if it never had to.
    """

    run: str
    state: RunState = "empty"
    summary: str = ""
    stage: str = ""
    started: float = 0.0
    active: float = 0.0
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    losses: Sequence[float] = ()
    tokens_per_second: float | None = None
    memory: int | None = None
    attempts: int = 0
    decision: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return the row for programs."""
        plain = {name: value for name, value in asdict(self).items() if name != "losses"}
        for name in ("loss", "validation_loss", "tokens_per_second"):
            plain[name] = _finite(plain[name])
        return plain | {"started": timestamp(self.started), "active": timestamp(self.active)}


class Board:
    """The runs of a source. Rows are kept until their files change. Threads may share it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._files: dict[str, Mapping[str, Stamp]] = {}
        self._rows: dict[str, tuple[Mapping[str, Stamp], Row, RunSummary]] = {}
        self._looked = -math.inf

    def files(self, run: str = "") -> Mapping[str, Mapping[str, Stamp]]:
        """Return the event files of every run, as of the last look.

        Args:
            run: looks again if this run is new.
        """
        with self._lock:
            # Several open pages share a look.
            is_old = time.monotonic() - self._looked >= LOOK_SECONDS
            if is_old or (run and run not in self._files):
                self._files = {run: self.source.events(run) for run in self.source.runs()}
                self._looked = time.monotonic()
                self._rows = {run: row for run, row in self._rows.items() if run in self._files}
            return self._files

    def runs(self) -> list[str]:
        """Return all runs, the most recently active first. It opens no file."""
        files = self.files()
        return sorted(files, key=lambda run: (-_written(files[run]), run))

    def row(self, run: str) -> Row:
        """Return a run's row. If the run is not there, the row says that it is empty."""
        files = self.files().get(run, {})
        known = self._rows.get(run)
        if known is None or known[0] != files:
            events = RunReader(self.source, run, BRIEF).events(files)
            working = outcome(replace(brief(self.source, run, events), running=True))
            known = files, row_of(self.source, run, events, _written(files)), working
            with self._lock:
                self._rows[run] = known
        _, row, working = known
        if row.state in _MAY_BE_RUNNING and self.source.is_held(run):
            return replace(row, state=working.state, summary=working.sentence)
        return row

    def rows(self, sort: Sort = "active", words: str = "") -> list[str]:
        """Return the runs whose name contains `words`, sorted. Only "active" and "run" are cheap.

        Runs without a value come last.
        """
        result = [run for run in self.runs() if words in run]
        if sort == "active":
            return result
        if sort == "run":
            return sorted(result)
        return sorted(result, key=lambda run: _order(self.row(run), sort))


def row_of(source: Source, run: str, events: list[Event], active: float = 0.0) -> Row:
    """Return the row that follows from events."""
    facts = brief(source, run, events)
    ran = latest(executions(events))
    how = outcome(facts)
    row = Row(run, how.state, how.sentence, active=active)
    if ran:
        row = replace(row, stage=ran[-1].stage, started=ran[0].start)
    if planned := facts.of(TrainingStarted):
        row = replace(row, max_steps=planned[-1].max_steps)
    if tried := facts.of(AttemptStarted):
        row = replace(row, attempts=max(event.attempt for event in tried))
    if steps := without_repeats(facts.of(TrainingStep)):
        last = steps[-1]
        points = [(event.step, event.loss) for event in steps if math.isfinite(event.loss)]
        row = replace(
            row,
            step=last.step,
            loss=last.loss,
            losses=[loss for _, loss in thin(points, SPARK_POINTS)],
            tokens_per_second=last.tokens_per_second,
            memory=last.gpu_memory_used or last.memory_used,
        )
    if scores := facts.of(Validated):
        row = replace(row, validation_loss=scores[-1].metrics.get("loss"))
    if decided := facts.of(DecisionMade):
        row = replace(row, decision=f"{decided[-1].action.replace('_', ' ')}: {decided[-1].reason}")
    return row


def _order(row: Row, sort: Sort) -> tuple[bool, float, str]:
    """Return a key: small losses first, otherwise large values first."""
    if sort == "state":
        return False, _ORDER.index(row.state), row.run
    value = {
        "step": row.step,
        "loss": row.loss,
        "speed": row.tokens_per_second,
        "memory": row.memory,
        "attempts": row.attempts,
    }[sort]
    known = value is not None and math.isfinite(value)
    shown = float(value) if known and value is not None else 0.0
    return not known, shown if sort == "loss" else -shown, row.run


def _written(files: Mapping[str, Stamp]) -> float:
    return max((stamp.written for stamp in files.values()), default=0.0)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


MOST_RUNS: Final = 10
"""How many runs a page compares at most."""
_KEPT: Final = MOST_RUNS + 2
"""Runs whose events are kept in memory."""


@dataclass(frozen=True)
class Opened:
    """A run as a page shows it.

    is_sample, unread: as in RunReader.
    """

    row: Row
    facts: Facts
    is_sample: bool
    unread: int


class Library:
    """Reads runs for pages. Threads may share it."""

    def __init__(self, source: Source) -> None:
        self.source, self.board = source, Board(source)
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, RunReader] = OrderedDict()

    def open(self, run: str) -> Opened:
        """Return a run.

        Raises:
            BadInput: there is no such run.
        """
        files = self.board.files(run) if re.fullmatch(RUN_NAME, run) else {}
        if run not in files:
            raise BadInput(f"run {run!r}: not in {self.source.uri}", remedy="see the list of runs")
        reader = self._reader(run)
        row = self.board.row(run)
        facts = full(self.source, run, reader.events(files[run]))
        facts.running = row.state in ("running", "pending")
        return Opened(row, facts, reader.is_sample, reader.unread)

    def version(self, runs: Sequence[str] = ()) -> int:
        """Return a number that changes when pages of these runs, or the list, show something new.

        This also reads a further part of long files, so that their pages get complete.
        """
        files = self.board.files()
        if not runs:
            # Few runs are active, and asking whether a process works on a run opens files.
            states = [self.board.row(run).state for run in self.board.runs()[:MOST_RUNS]]
            return hash((*states, *((run, *result.items()) for run, result in files.items())))
        seen: list[object] = []
        for run in [name for name in runs[:MOST_RUNS] if name in files]:
            reader = self._reader(run)
            reader.fill()
            seen += [run, bool(reader.unread), self.board.row(run).state]
            seen += [*files[run].items(), *self.source.logs(run).items()]
        return hash(tuple(seen))

    def _reader(self, run: str) -> RunReader:
        with self._lock:
            if run not in self._readers:
                self._readers[run] = RunReader(self.source, run, FULL)
            self._readers.move_to_end(run)
            while len(self._readers) > _KEPT:
                self._readers.popitem(last=False)
            return self._readers[run]
