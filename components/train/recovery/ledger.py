"""The record of a run's attempts, from which any supervisor rebuilds its state.

A supervisor writes its events that are state into a log of its own among the run's events,
`events/ledger-GENERATION.jsonl`, and nowhere else. The log also has copies of what the ranks report
that is state: the ranks' files have no checksums, and a flipped bit that is still valid JSON could
change the weights.

The numbers of the lines continue from log to log. A supervisor that was paused while another one
took over may still append to its log. The other one's log has the same numbers, and they count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from steadytrain.components.shared.append_log import (
    NUMBER,
    FileLog,
    encode,
    repaired,
    same,
)
from steadytrain.components.shared.errors import BadInput, Unreadable
from steadytrain.components.shared.events import Event, JsonLines, read_events
from steadytrain.components.shared.events.stream import COPY, from_json, to_json
from steadytrain.components.shared.lease import Lease
from steadytrain.components.shared.retry import REJECTED_SECONDS, retry_storage
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.recovery.history import History, State, is_of_rank

SCHEMA_VERSION: Final = 3
_LOG = re.compile(r"ledger-(\d{8,})\.jsonl")
_ACCEPTED = re.compile(r"ledger-entry-(\d{8,})\.lost")
"""Matches the name of a file with which a person has accepted that entries are lost."""


class LedgerDamaged(BadInput):
    """Ledger entries are permanently lost; the message names them and says how to continue."""


class _Loss(NamedTuple):
    """Lost entries.

    first: the number of the first one.
    problem: what is wrong, in words.
    """

    first: int
    problem: str


class _Content(NamedTuple):
    """What a run's logs contain.

    restored: which damaged lines could be restored, in words.
    last: the number of the last entry, lost or not.
    cut: whether that one is lost.
    """

    history: History
    losses: list[_Loss]
    restored: list[str]
    last: int
    cut: bool


class Ledger:
    """Writes and reads the state of one run. What was read once is only updated afterwards.

    lease: held by the writer; a reader needs none.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.lease: Lease | None = None
        self._read: _Content | None = None
        self._log: FileLog | None = None

    def record(self, event: State, *, seconds: float = 0.0) -> None:
        """Write an event.

        Args:
            seconds: how long to retry if storage refuses.

        Raises:
            StorageError: the event cannot be written.
            RunBusy: another supervisor has taken over the run.
        """
        retry_storage(lambda: self._write(event), seconds)

    def emit(self, placed: Event, stream: JsonLines) -> None:
        """Record an event of the supervisor, or write it to its stream if it only reports.

        Args:
            placed: has its time by the run's clock.
        """
        if isinstance(placed, State):
            self.record(placed, seconds=REJECTED_SECONDS)
        else:
            stream.append(placed)

    def history(self) -> History:
        """Return the history so far. It grows with each event that is recorded here.

        Raises:
            LedgerDamaged: entries are lost.
            BadInput: another version of steadytrain wrote the ledger.
        """
        if self._read is None:
            if self._has_earlier_version():
                raise BadInput(
                    f"run {self.workspace.run_id!r} has a ledger of schema version 2 or 1 "
                    f"({self.workspace.folder}/ledger); this steadytrain continues runs with "
                    f"version {SCHEMA_VERSION}",
                    remedy="finish it with the version that began it (steadytrain 0.1.0), or give "
                    "this run another name (run: ...)",
                )
            content = self._content()
            if content.losses:
                raise self._damaged(content.losses)
            self._read = content
        return self._read.history

    def readable(self) -> tuple[History, list[str]]:
        """Return everything readable and a list of what is lost, for read-only use.

        Raises:
            BadInput: a newer version of steadytrain wrote the ledger.
        """
        if self._has_earlier_version():
            # That version wrote each entry to the run's events too.
            events = read_events(self.workspace.events)
            return History.of(event for event in events if isinstance(event, State)), []
        content = self._content()
        return content.history, [loss.problem for loss in content.losses]

    def check(self, attempts: int) -> None:
        """Compare the ledger with what is known from other sources.

        Args:
            attempts: how many attempts left traces.

        Raises:
            LedgerDamaged: it does not contain them.
        """
        if attempts < self.history().next_attempt:
            return
        assert self._read is not None
        if not self._read.cut:
            first = self._read.last + 1
            problem = f"entry {first} is missing: attempt {attempts} left traces"
            raise self._damaged([_Loss(first, problem)])

    @property
    def restored(self) -> list[str]:
        """The damaged lines of the logs that could be restored, in words, once they were read."""
        return self._read.restored if self._read else []

    def generation(self) -> int:
        """Return the highest generation of a supervisor that has written."""
        return max(self._numbered(_LOG), default=0)

    def _write(self, event: State) -> None:
        if self.lease is not None:
            self.lease.fence()
        history = self.history()
        generation = self.lease.generation if self.lease else 0
        if self._log is None:
            assert self._read is not None
            self._log = FileLog(self.workspace.events / f"ledger-{generation:08d}.jsonl")
            self._log.scan()
            self._log.next = self._read.last + 1
        self._log.append(self._record(event, generation))
        history.add(event)

    def _record(self, event: State, generation: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(to_json(event, job_id=self.workspace.run_id))
        if is_of_rank(event):
            content = {COPY: content.pop("event"), **content}
        return {"schema_version": SCHEMA_VERSION, "generation": generation} | content

    def _content(self) -> _Content:
        states, problems, restored = dict[int, State](), dict[int, str](), list[str]()
        for path in self._numbered(_LOG).values():
            end = max([0, *states, *problems]) + 1
            try:
                lines = FileLog(path).scan() if path.is_file() else None
            except Unreadable:
                lines = None
            if lines is None:
                problems[end] = f"{path} cannot be read"
                continue
            known = (
                (index, line[NUMBER]) for index, line in enumerate(lines) if isinstance(line, dict)
            )
            start = next((number - index for index, number in known), end)
            # Lines that an earlier supervisor wrote after this one took over are void.
            states = {number: event for number, event in states.items() if number < start}
            problems = {number: why for number, why in problems.items() if number < start}
            number = start
            for index, line in enumerate(lines):
                where = f"line {index + 1} of {path}"
                records = [line] if isinstance(line, dict) else self._restored(line, number, path)
                changed = f"{where} has changed since it was written (CRC-32)"
                if not records:
                    problems[number] = changed
                elif isinstance(line, bytes):
                    restored.append(f"{changed}; what was there could be restored")
                for record in records:
                    number = record[NUMBER]
                    try:
                        states[number] = _event(record, where)
                    except ValueError as error:
                        problems[number] = f"{where} has no event: {error}"
                number += 1
        accepted = self._numbered(_ACCEPTED)
        last = max([0, *states, *problems, *accepted])
        losses = [
            loss
            for loss in _losses(states, problems, last, self.workspace.events)
            if loss.first not in accepted
        ]
        history = History.of(states[number] for number in sorted(states))
        return _Content(history, losses, restored, last, cut=last > 0 and last not in states)

    def _restored(self, line: bytes, number: int, path: Path) -> list[dict[str, Any]]:
        """Return the records of a damaged line as far as they are certain; empty if they are not.

        It had one flipped bit, or is the copy of what a rank reported: the line and the rank's own
        file do not have the same damage.
        """
        if records := repaired(line):
            return records
        for event in self._reported:
            if is_of_rank(event):
                record = self._record(event, int(path.stem.partition("-")[2]))
                if same(line, encode(record, number)):
                    return [{NUMBER: number, **record}]
        return []

    @cached_property
    def _reported(self) -> list[Event]:
        """What the run's processes have reported. Read only for a ledger that is damaged."""
        return read_events(self.workspace.events)

    def _has_earlier_version(self) -> bool:
        """Return whether a version that had one file for each entry wrote the ledger."""
        return any((self.workspace.folder / "ledger").glob("[0-9]*.json"))

    def _numbered(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        """Return the files whose names match, by their numbers, in order."""
        paths = self.workspace.events.glob("ledger-*")
        result = {int(match[1]): path for path in paths if (match := pattern.fullmatch(path.name))}
        return dict(sorted(result.items()))

    def _damaged(self, losses: list[_Loss]) -> LedgerDamaged:
        lost = "; ".join(loss.problem for loss in losses)
        folder = self.workspace.events
        accept = " ".join(str(folder / f"ledger-entry-{loss.first:08d}.lost") for loss in losses)
        return LedgerDamaged(
            f"the ledger of run {self.workspace.run_id!r} is damaged: {lost}",
            remedy="restore it from a backup, or give this run another name (run: ...). To "
            "continue without the lost entries (counted failures, skipped batches, "
            "lowered learning rates, memory limits), which may change the weights: "
            f"touch {accept}",
        )


def _event(line: dict[str, Any], where: str) -> State:
    """Return the event of a line.

    Raises:
        BadInput: another version of steadytrain wrote it.
        ValueError: it has no event that is state.
    """
    version = line.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BadInput(
            f"{where} has schema version {version}; this steadytrain reads {SCHEMA_VERSION}",
            remedy="install the version that wrote it, or use another run name",
        )
    if COPY in line:
        line = {**line, "event": line[COPY]}
    event = from_json(json.dumps(line))
    if not isinstance(event, State):
        raise ValueError(f"{event.name} is not state")
    return event


def _losses(
    found: Mapping[int, Event], problems: Mapping[int, str], last: int, folder: Path
) -> Iterator[_Loss]:
    """Yield the losses, one for each sequence of entries that are lost together."""
    first, why = 0, list[str]()
    for number in range(1, last + 2):
        if number <= last and number not in found:
            first = first or number
            why += filter(None, [problems.get(number)])
        elif first:
            names = f"entry {first}" if first == number - 1 else f"entries {first} to {number - 1}"
            yield _Loss(first, "; ".join(why) or f"{names} of {folder}/ledger-* are missing")
            first, why = 0, []
