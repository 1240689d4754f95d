"""What all open pages share: the list of runs, and the few runs that pages show at the moment."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.config.run import RUN_NAME
from steadytrain.components.shared.errors import BadInput
from steadytrain.pipelines.view.board import Board, Row
from steadytrain.pipelines.view.reader import FULL, RunReader, full
from steadytrain.pipelines.view.source import Source

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
            return hash((*states, *((run, *found.items()) for run, found in files.items())))
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
