"""The event stream and its simplest sink: a file of JSON lines.

The file is also the spool. Everything that needs a run's events (progress display, MLflow, the
report) reads the file, so no reader can slow down or stop the writer.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from steadytrain.components.shared.events.cursor import newest
from steadytrain.components.shared.events.types import Event, Warned, to_json
from steadytrain.components.shared.quantities import LATEST
from steadytrain.components.shared.storage.regular import set_aside

MAX_WAITING = 10_000
"""Maximum number of events that wait in memory while the disk rejects writes: about 5 MB."""


class Reader(Protocol):
    """Reads a run's events from its files, in a thread of its own, until it is closed."""

    def close(self) -> None:
        """Deliver everything that is still held."""


@runtime_checkable
class Sink(Reader, Protocol):
    """Receives events as they come. It must not block for long and must not raise."""

    def emit(self, event: Event) -> None:
        """Receive one event."""


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
        self._ahead = max(0.0, newest(path.parent) - self._clock)
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


def _torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line."""
    with path.open("rb") as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return False
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) != b"\n"
