"""The one stream of events and its plainest sink: a file of JSON lines.

The file is also the spool: whoever wants a run's events (progress display,
MLflow, the report) reads it, so that no reader can slow or stop the writer.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from steadytrain.components.shared.events.types import LATEST, Event, Warned, from_json, to_json
from steadytrain.components.shared.storage.regular import open_regular, set_aside

MAX_WAITING = 10_000
"""Events that wait for a disk that refuses them: about 5 MB."""


MAX_AHEAD_SECONDS = 86_400.0
"""How far clocks may differ, or be set back, with events still in the order of what happened."""
_TAIL_BYTES = 1 << 16


class Sink(Protocol):
    """Takes events; must neither block for long nor raise."""

    def emit(self, event: Event) -> None:
        """Takes one event."""

    def close(self) -> None:
        """Delivers what is still held."""


class EventStream:
    """Hands each event to every sink."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            sink.emit(event)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class JsonLines:
    """Appends each event to a file as a line of JSON, whole lines only.

    A full or failing disk stops nobody: events wait in memory until a write succeeds, the oldest
    are dropped beyond MAX_WAITING, and a warning in the file then says what happened.

    Where the clock is behind the events that are there, as when it was set back or is another
    node's, times are put forward by as much, so that their order is that of what happened.
    """

    def __init__(self, path: Path, *, job_id: str) -> None:
        self.job_id = job_id
        moved = [
            (place, set_aside(place))
            for place, fits in ((path.parent, Path.is_dir), (path, Path.is_file))
            if os.path.lexists(place) and not fits(place)
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, which would write again at exit what is counted as refused here.
        self.handle = path.open("ab", buffering=0)
        # Where a writer died in the middle of a line, what follows must not be lost with it.
        self._torn = _torn(path)
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._dropped, self._refusal = 0, ""
        self._clock = time.time()
        self._ahead = max(0.0, _newest(path.parent) - self._clock)
        for place, now in moved:
            message = f"{place} was not what a run keeps there; it was moved to {now}"
            self.emit(Warned(stage=path.stem, message=message))

    def emit(self, event: Event) -> None:
        self._dropped += len(self._waiting) == MAX_WAITING
        self._waiting.append(self._line(event))
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
            if self._refusal:
                self._write(self._line(self._warning()))
        except OSError as error:
            self._refusal = error.strerror or repr(error)
        else:
            self._dropped, self._refusal = 0, ""

    def close(self) -> None:
        self.handle.close()

    def _line(self, event: Event) -> bytes:
        now = time.time()
        self._ahead += max(0.0, self._clock - now)
        self._clock = now
        placed = replace(event, time=min(event.time + self._ahead, LATEST))
        return f"{to_json(placed, job_id=self.job_id)}\n".encode()

    def _write(self, line: bytes) -> None:
        """Writes a whole line; a part of one that was refused is ended before the next."""
        text = b"\n" + line if self._torn else line
        written = self.handle.write(text)
        self._torn = written != len(text) and (self._torn or written > 0)
        if written != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _warning(self) -> Warned:
        place = Path(self.handle.name)
        lost = f"; {self._dropped} of them are lost" if self._dropped else ""
        return Warned(
            stage=place.stem, message=f"events came late to {place}: {self._refusal}{lost}"
        )


class Follower:
    """Reads the events of all files of a folder, each once, as they are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[str, int] = {}

    def skip_to_end(self) -> None:
        """Leaves out what is there already."""
        for path in self.folder.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                self.offsets[path.name] = path.stat().st_size

    def new(self) -> list[Event]:
        """Events appended since the last call, in the order of their times."""
        events = []
        for item in unread(self.folder, dict(self.offsets)):
            self.offsets[item.file] = item.offset
            events.append(item.event)
        return sorted(events, key=lambda event: event.time)


class Placed(NamedTuple):
    """An event, the file that it is in, and the offset in bytes where its line ends."""

    event: Event
    file: str
    offset: int


def unread(folder: Path, offsets: Mapping[str, int]) -> Iterator[Placed]:
    """Events of a folder's files beyond an offset in each, one after another by their times.

    Files are read a line at a time: they may be larger than the memory.
    """
    paths = sorted(folder.glob("*.jsonl"))
    tails = [_tail(path, offsets.get(path.name, 0)) for path in paths]
    return heapq.merge(*tails, key=lambda item: item.event.time)


def read_events(folder: Path) -> list[Event]:
    """Every event of a run so far, in the order of their times."""
    return Follower(folder).new()


def _tail(path: Path, offset: int) -> Iterator[Placed]:
    """Whole lines; one that a kill has torn, or of a newer version, is left out.

    Of a file that cannot be read, none: `problems` tells why.
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
                continue
            yield Placed(event, path.name, offset)


def _newest(folder: Path) -> float:
    """Time of a folder's newest event; one in the far future is a mistake, and no measure."""
    farthest = time.time() + MAX_AHEAD_SECONDS
    found = 0.0
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            offset = max(0, path.stat().st_size - _TAIL_BYTES)
            times = [placed.event.time for placed in _tail(path, offset)]
            found = max([found, *(when for when in times if when <= farthest)])
    return found


def problems(folder: Path) -> list[str]:
    """Files of a folder that tell nothing, each with the reason."""
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
    """Whether the file ends within a line."""
    with path.open("rb") as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return False
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) != b"\n"
