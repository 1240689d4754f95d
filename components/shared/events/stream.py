"""The event stream and its simplest sink: a file of JSON lines.

The file is also the spool. Everything that needs a run's events (progress display, MLflow, the
report) reads the file, so no reader can slow down or stop the writer.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from steadytrain.components.shared.events.types import LATEST, Event, Warned, from_json, to_json
from steadytrain.components.shared.storage.regular import open_regular, set_aside

MAX_WAITING = 10_000
"""Maximum number of events that wait in memory while the disk rejects writes: about 5 MB."""


FARTHEST = 4_102_444_800.0
"""The start of the year 2100: a later time is an error, and must not shift later events."""
_TAIL_BYTES = 1 << 16


class Sink(Protocol):
    """Receives events. It must not block for long and must not raise."""

    def emit(self, event: Event) -> None:
        """Receive one event."""

    def close(self) -> None:
        """Deliver everything that is still held."""


class EventStream:
    """Passes each event to every sink."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.emit(event)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class JsonLines:
    """Appends each event to a file as one complete line of JSON.

    A full or failing disk never stops a run. Events wait in memory until a write succeeds, and
    beyond MAX_WAITING the oldest are dropped. Afterwards, a warning in the file says what happened.

    If the clock is behind the events in the folder (it was set back, or another node wrote them),
    event times are moved forward by the difference, so that events stay in the order in which they
    happened. This is the run's clock: `placed` reads it, for whoever stores an event elsewhere too.
    """

    def __init__(self, path: Path, *, job_id: str) -> None:
        self.job_id = job_id
        moved = [
            (place, set_aside(place))
            for place, fits in ((path.parent, Path.is_dir), (path, Path.is_file))
            if os.path.lexists(place) and not fits(place)
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a buffer would write again at exit what counts as rejected here.
        self.handle = path.open("ab", buffering=0)
        # If a writer died in the middle of a line, the next line must not be lost with it.
        self._torn = _torn(path)
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._dropped, self._refusal = 0, ""
        self._clock, self._ticks = time.time(), time.monotonic()
        self._ahead = max(0.0, _newest(path.parent) - self._clock)
        for place, now in moved:
            message = f"{place} was not a file that a run writes there; it was moved to {now}"
            self.emit(Warned(stage=path.stem, message=message))

    def emit(self, event: Event) -> None:
        self.append(self.placed(event))

    def now(self) -> float:
        """Return the time by the run's clock."""
        now, ticks = time.time(), time.monotonic()
        if now < self._clock:
            # It was set back. The time that has passed since the last reading counts too: an event
            # that was created a moment before this call must not be earlier than the last one.
            self._ahead += self._clock + ticks - self._ticks - now
        self._clock, self._ticks = now, ticks
        return now + self._ahead

    def placed(self, event: Event) -> Event:
        """Return the event with its time by the run's clock instead of this machine's."""
        before = self._ahead
        self.now()
        told = ((name, getattr(event, name)) for name in event.moments)
        # A time after the clock's was read before the clock was set back.
        moved = {
            name: min(when + (before if when > self._clock else self._ahead), LATEST)
            for name, when in told
            if when
        }
        return replace(event, **moved)

    def append(self, placed: Event) -> None:
        """Write an event whose time is by the run's clock already."""
        self._dropped += len(self._waiting) == MAX_WAITING
        self._waiting.append(self._line(placed))
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
            if self._refusal:
                self._write(self._line(self.placed(self._warning())))
        except OSError as error:
            self._refusal = error.strerror or repr(error)
        else:
            self._dropped, self._refusal = 0, ""

    def close(self) -> None:
        self.handle.close()

    def _line(self, placed: Event) -> bytes:
        return f"{to_json(placed, job_id=self.job_id)}\n".encode()

    def _write(self, line: bytes) -> None:
        """Write a complete line. If the previous line was cut off, end it first."""
        text = b"\n" + line if self._torn else line
        written = self.handle.write(text)
        self._torn = written != len(text) and (self._torn or written > 0)
        if written != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _warning(self) -> Warned:
        place = Path(self.handle.name)
        lost = f"; {self._dropped} of them are lost" if self._dropped else ""
        return Warned(
            stage=place.stem,
            message=f"{place} could not be written for a while: {self._refusal}{lost}",
        )


class Follower:
    """Reads the events of all files in a folder as they are appended, each event once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[str, int] = {}

    def skip_to_end(self) -> None:
        """Skip the existing events."""
        for path in self.folder.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                self.offsets[path.name] = path.stat().st_size

    def new(self) -> list[Event]:
        """Return the events appended since the last call, ordered by time."""
        events = []
        for item in unread(self.folder, dict(self.offsets)):
            self.offsets[item.file] = item.offset
            events.append(item.event)
        return sorted(events, key=lambda event: event.time)


class Placed(NamedTuple):
    """An event, its file, and the byte offset of the end of its line."""

    event: Event
    file: str
    offset: int


def unread(
    folder: Path, offsets: Mapping[str, int], skipped: Counter[str] | None = None
) -> Iterator[Placed]:
    """Yield the events after a given offset in each file of a folder, ordered by time.

    It reads one line at a time, because files may be larger than memory.

    Args:
        folder: the folder.
        offsets: by file name; 0 for a file without one.
        skipped: counts the lines of each file that are not an event.
    """
    paths = sorted(folder.glob("*.jsonl"))
    tails = [_tail(path, offsets.get(path.name, 0), skipped) for path in paths]
    return heapq.merge(*tails, key=lambda item: item.event.time)


def read_events(folder: Path, skipped: Counter[str] | None = None) -> list[Event]:
    """Return every event of a run so far, ordered by time. See `unread`."""
    found = (item.event for item in unread(folder, {}, skipped))
    return sorted(found, key=lambda event: event.time)


def _tail(path: Path, offset: int, skipped: Counter[str] | None = None) -> Iterator[Placed]:
    """Yield the events of complete lines. Torn lines and events of newer versions are skipped.

    A file that cannot be read yields nothing; `problems` reports why.
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
                if skipped is not None:
                    skipped[path.name] += 1
                continue
            yield Placed(event, path.name, offset)


def _newest(folder: Path) -> float:
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


def _torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line."""
    with path.open("rb") as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return False
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) != b"\n"
