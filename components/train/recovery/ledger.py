"""The record of a run's attempts, from which any supervisor rebuilds its state.

Each event is one small JSON object, written once under a sortable name. The state exists only
here, so nothing is lost when a supervisor dies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from steadytrain.components.shared.errors import BadInput, Unreadable
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.lease import Lease
from steadytrain.components.shared.retry import retry_storage
from steadytrain.components.shared.storage import Storage
from steadytrain.components.shared.storage.regular import set_aside
from steadytrain.components.train.recovery.entries import (
    KEPT,
    Entry,
    decode,
    encode,
    merged,
    numbered,
    restored,
    without_holes,
)
from steadytrain.components.train.recovery.history import History, history_of

_ENTRY = re.compile(r"(\d{8})\.(json|lost)")
"""Matches an entry, and an entry whose loss a person has accepted."""


class LedgerDamaged(BadInput):
    """Ledger entries are permanently lost; the message names them and says how to continue."""


class Ledger:
    """Writes and reads the events of one run.

    lease: held by the writer; a reader needs none.
    """

    def __init__(self, storage: Storage, *, run_id: str) -> None:
        self.storage, self.run_id = storage, run_id
        self.lease: Lease | None = None
        # List only once: a long run's ledger has thousands of events.
        self._next = 0

    def record(self, event: Event, *, seconds: float = 0.0) -> Event:
        """Write an event that is state; ignore other events.

        Args:
            seconds: how long to retry if storage refuses.

        Returns:
            The event as it was recorded, with the number of its entry.

        Raises:
            StorageError: the event cannot be written.
            RunBusy: another supervisor has taken over the run.
        """
        if not isinstance(event, KEPT):
            return event
        return retry_storage(lambda: self._write(event), seconds)

    def history(self) -> History:
        """Return the history so far.

        Ignores what a supervisor wrote after another one took over: it may have been paused for a
        long time between checking the lease and writing.

        Raises:
            LedgerDamaged: an entry is lost; `repair` may restore it.
            BadInput: a newer version wrote the ledger.
        """
        entries = self.entries()
        holes = [entry for entry in entries if entry.is_hole]
        if holes:
            raise self._damaged(holes)
        return history_of(entries)

    def history_from(self, events: Sequence[Event]) -> tuple[History, list[str]]:
        """Return everything readable and a list of what is lost, for read-only use.

        Args:
            events: the run's events, from which entries are restored.
        """
        entries = self.entries()
        entries = merged(entries, restored(entries, events))
        problems = [f"{self._path(entry)} {entry.problem}" for entry in entries if entry.is_hole]
        return history_of(without_holes(entries)), problems

    def repair(self, events: Sequence[Event], *, attempts: int = 0) -> list[str]:
        """Restore damaged or missing entries. A damaged file is kept next to its entry.

        Args:
            events: the run's events.
            attempts: how many attempts are known from other sources.

        Returns:
            What was restored, in words.

        Raises:
            LedgerDamaged: an entry is lost and no event contains it.
        """
        entries = self.entries()
        put_back = restored(entries, events)
        whole = merged(entries, put_back)
        holes = [entry for entry in whole if entry.is_hole]
        accepted = bool(whole) and whole[-1].event is None
        if not holes and not accepted and attempts >= history_of(whole).next_attempt:
            end = whole[-1].number + 1 if whole else 1
            holes = [Entry(end, problem=f"is missing: attempt {attempts} left traces")]
        if holes:
            raise self._damaged(holes)
        for entry in put_back:
            assert entry.event is not None
            path = self._path(entry)
            if os.path.lexists(path):
                set_aside(path)
            body = encode(entry.event, generation=entry.generation, run_id=self.run_id)
            self.storage.write(path.name, body)
        return [f"{self._path(entry)} ({entry.event.name})" for entry in put_back if entry.event]

    def generation(self) -> int:
        """Return the highest generation of any undamaged entry."""
        return max((entry.generation for entry in self.entries()), default=0)

    def entries(self) -> list[Entry]:
        """Return all entries in numeric order, with a hole for each lost one."""
        names = {name: match for name in self.storage.list() if (match := _ENTRY.fullmatch(name))}
        accepted = {int(match[1]) for match in names.values() if match[2] == "lost"}
        found = {
            int(match[1]): self._read(name) for name, match in names.items() if match[2] == "json"
        }
        last = max([*accepted, *(item.number for item in found.values() if item.event)], default=0)
        # Writers skip no number: an unreadable file that does not follow an entry is not an entry.
        while last + 1 in found:
            last += 1
        return [
            Entry(number)
            if number in accepted
            else found.get(number, Entry(number, problem="is missing"))
            for number in range(1, last + 1)
        ]

    def _write(self, event: Event) -> Event:
        if self.lease is not None:
            self.lease.fence()
        if not self._next:
            self._next = max((entry.number for entry in self.entries()), default=0) + 1
        # Another writer may take the number first, so each event keeps its own name. A write that
        # was refused may still have happened; then the file exists.
        generation, written = self.lease.generation if self.lease else 0, False
        while not written:
            event, name = numbered(event, self._next), f"{self._next:08d}.json"
            body = encode(event, generation=generation, run_id=self.run_id)
            written = self.storage.write(name, body, if_absent=True) or self._is(name, body)
            self._next += 1
        return event

    def _is(self, name: str, body: bytes) -> bool:
        try:
            return self.storage.read(name) == body
        except (FileNotFoundError, Unreadable):
            return False

    def _read(self, name: str) -> Entry:
        number = int(name.partition(".")[0])
        try:
            return decode(number, self.storage.read(name))
        except FileNotFoundError:
            return Entry(number, problem="is missing")
        except Unreadable as error:
            return Entry(number, problem=f"cannot be read: {error.message}")

    def _path(self, entry: Entry) -> Path:
        return Path(self.storage.uri) / f"{entry.number:08d}.json"

    def _damaged(self, holes: Sequence[Entry]) -> LedgerDamaged:
        lost = "; ".join(f"{self._path(hole)} {hole.problem}" for hole in holes)
        accept = " ".join(str(self._path(hole).with_suffix(".lost")) for hole in holes)
        return LedgerDamaged(
            f"the ledger of run {self.run_id!r} is damaged, and its events do not show what is "
            f"lost: {lost}",
            remedy="restore it from a backup, or give this run another name (run: ...). To "
            "continue without the lost entries (counted failures, skipped batches, "
            "lowered learning rates, memory limits), which may change the weights: "
            f"touch {accept}",
        )
