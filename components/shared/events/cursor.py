"""Reads the event files of a run: everything that needs its events reads them here."""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from steadytrain.components.shared.events.types import COPY, Event, from_json
from steadytrain.components.shared.storage.regular import open_regular

FARTHEST = 4_102_444_800.0
"""The start of the year 2100: a later time is an error, and must not shift later events."""
_TAIL_BYTES = 1 << 16


class Placed(NamedTuple):
    """An event, its file, and the byte offset of the end of its line."""

    event: Event
    file: str
    offset: int


class Cursor:
    """A place in the events of a run. Events are read after it, and `ack` moves it past them.

    What was read and not acknowledged is read again.

    Args:
        folder: of the event files.
        place: byte offset in each file; 0 for a file without one.

    Attributes:
        place: the offset in each file up to which everything is acknowledged.
    """

    def __init__(self, folder: Path, place: Mapping[str, int] | None = None) -> None:
        self.folder, self.place = folder, dict(place or {})
        self._read = dict(self.place)

    def read(self, skipped: Counter[str] | None = None) -> Iterator[Placed]:
        """Yield the events after the place, ordered by time.

        It reads one line at a time, because files may be larger than memory.

        Args:
            skipped: counts the lines of each file that are not an event.
        """
        self._read = dict(self.place)
        paths = sorted(self.folder.glob("*.jsonl"))
        tails = [_tail(path, self.place.get(path.name, 0), skipped, self._read) for path in paths]
        for item in heapq.merge(*tails, key=lambda item: item.event.time):
            self._read[item.file] = item.offset
            yield item

    def batch(self, most: int, wanted: Callable[[Event], bool]) -> list[Event]:
        """Return the next events that are wanted, ordered by time.

        Args:
            most: maximum number of events.
        """
        events = list[Event]()
        for item in self.read():
            if wanted(item.event):
                events.append(item.event)
            if len(events) == most:
                break
        return events

    def ack(self) -> bool:
        """Move the place past everything that was read. Return whether that is anything."""
        moved, self.place = self._read != self.place, dict(self._read)
        return moved

    def new(self) -> list[Event]:
        """Return and acknowledge the events after the place, ordered by time."""
        events = [item.event for item in self.read()]
        self.ack()
        return sorted(events, key=lambda event: event.time)

    def skip_to_end(self) -> None:
        """Move the place past the existing events."""
        for path in self.folder.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                self.place[path.name] = path.stat().st_size


def read_events(folder: Path, skipped: Counter[str] | None = None) -> list[Event]:
    """Return every event of a run so far, ordered by time. See `Cursor.read`."""
    found = (item.event for item in Cursor(folder).read(skipped))
    return sorted(found, key=lambda event: event.time)


def newest(folder: Path) -> float:
    """Return the time of a folder's newest event that is possible, however late the clock is now.

    A step that starts with the clock of 1970, or long before the last one, still comes after it.
    """
    found = 0.0
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            offset = max(0, path.stat().st_size - _TAIL_BYTES)
            times = [placed.event.time for placed in _tail(path, offset)]
            found = max([found, *(when for when in times if when <= FARTHEST)])
    return found


def problems(folder: Path) -> list[str]:
    """Return the files of a folder from which no event can be read, each with the reason."""
    if os.path.lexists(folder) and not folder.is_dir():
        return [f"{folder}: not a folder"]
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            with open_regular(path) as handle:
                size = handle.seek(0, os.SEEK_END)
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
        else:
            if size and next(_tail(path, 0), None) is None:
                found.append(f"{path}: no event in it")
    return found


def _tail(
    path: Path,
    offset: int,
    skipped: Counter[str] | None = None,
    passed: dict[str, int] | None = None,
) -> Iterator[Placed]:
    """Yield the events of complete lines. Torn lines and events of newer versions are skipped.

    A file that cannot be read yields nothing; `problems` reports why.

    Args:
        skipped: as for `Cursor.read`.
        passed: gets the offset of the end of each line that is skipped.
    """
    with contextlib.suppress(OSError), open_regular(path) as handle:
        handle.seek(offset)
        for line in handle:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                event = from_json(line.decode("utf-8", "replace"))
            except ValueError:
                if skipped is not None and COPY.encode() not in line:
                    skipped[path.name] += 1
                if passed is not None:
                    passed[path.name] = offset
                continue
            yield Placed(event, path.name, offset)
