"""The event stream and its simplest sink: a file of JSON lines.

The file is also the spool. Everything that needs a run's events (progress display, MLflow, the
report) reads the file, so no reader can slow down or stop the writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import heapq
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from pydantic import TypeAdapter

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import DecisionMade, Event, Warned
from steadytrain.components.shared.quantities import LATEST
from steadytrain.components.shared.storage.local import open_regular, set_aside

# Create the encoder once and do not copy fields: this code runs between training steps.
_encode = json.JSONEncoder(ensure_ascii=False).encode
COPY: Final = "copy_of"
"""In a ledger, the key in place of `event` in a line that copies an event of another file."""
_LARGEST = 1 << 63
"""Beyond the floats, a whole number cannot be shown. Nothing that is counted comes near this."""
_TYPES: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}
_BATCH = tuple(item.name for item in dataclasses.fields(BatchSettings))


def to_json(event: Event, *, job_id: str) -> str:
    """Return one line of JSON: event, level, job_id, and the event's own fields.

    The fields of `batch` are among the others, and null if there is none.
    """
    content: dict[str, Any] = {"event": event.name, "level": event.severity, "job_id": job_id}
    content |= vars(event)
    if "batch" in content:
        batch = content.pop("batch")
        content |= vars(batch) if batch else dict.fromkeys(_BATCH)
    # Python writes NaN and Infinity, which a diverged loss needs. All readers use Python too.
    return _encode(content)


_DIVERGING = {"loss", "grad_norm", "best_score", "scale", "signal", "noise"}
"""Fields that may be NaN or infinite, because training diverges. In others, the line is damaged."""
_RENAMED = {"rung": "fallback"}
"""Fields that older versions wrote under another name."""


def from_json(line: str) -> Event:
    """Return the event in a line.

    Raises:
        ValueError: if the line is torn, has no known event, or has a field of the wrong type or
            with an impossible value.
    """
    try:
        content = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested brackets instead of an event") from error
    name = content.pop("event", "") if isinstance(content, dict) else ""
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"no known event in {line[:80]!r}")
    content.update({new: content[old] for old, new in _RENAMED.items() if old in content})
    validator, known = _validator(name)
    if "batch" in known:
        content["batch"] = _batch(name, content)
    event = validator.validate_python({key: content[key] for key in known if key in content})
    if not 0 <= event.time <= LATEST:
        raise ValueError(f"an event with an impossible time: {event.time}")
    for key, value in vars(event).items():
        too_large = type(value) is int and abs(value) > _LARGEST
        if too_large or (type(value) is float and not isfinite(value) and key not in _DIVERGING):
            raise ValueError(f"an event with an impossible number: {key}")
    return event


def _batch(name: str, content: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the batch settings; None if the event has none."""
    fields = {field: content[field] for field in _BATCH if field in content}
    if name == DecisionMade.name:
        # A decision that names no strategy keeps the one in use.
        fields.setdefault("strategy", "")
    return fields if fields.get("micro_batch_size") is not None else None


def prepare_validators() -> None:
    """Build the validators of all events now, for the forks of this process."""
    for name in _TYPES:
        _validator(name)


@functools.cache
def _validator(name: str) -> tuple[TypeAdapter[Event], tuple[str, ...]]:
    """Return the validator for an event's fields, and their names."""
    kind = _TYPES[name]
    return TypeAdapter(kind), tuple(item.name for item in dataclasses.fields(kind))


FARTHEST = 4_102_444_800.0
"""The start of the year 2100: a later time is an error, and must not shift later events."""
_TAIL_BYTES = 1 << 16


class PositionedEvent(NamedTuple):
    """An event, its file, and the byte offset of the end of its line."""

    event: Event
    file: str
    offset: int


class Cursor:
    """A position in the events of a run. Events are read after it, and `ack` moves it past them.

    What was read and not acknowledged is read again.

    Args:
        folder: of the event files.
        position: byte offset in each file; 0 for a file without one.

    Attributes:
        position: the offset in each file up to which everything is acknowledged.
    """

    def __init__(self, folder: Path, position: Mapping[str, int] | None = None) -> None:
        self.folder, self.position = folder, dict(position or {})
        self._read = dict(self.position)

    def read(self, skipped: Counter[str] | None = None) -> Iterator[PositionedEvent]:
        """Yield the events after the position, ordered by time.

        It reads one line at a time, because files may be larger than memory.

        Args:
            skipped: counts the lines of each file that are not an event.
        """
        self._read = dict(self.position)
        paths = sorted(self.folder.glob("*.jsonl"))
        tails = [
            _tail(path, self.position.get(path.name, 0), skipped, self._read) for path in paths
        ]
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
        """Move the position past everything that was read. Return whether that is anything."""
        moved, self.position = self._read != self.position, dict(self._read)
        return moved

    def new(self) -> list[Event]:
        """Return and acknowledge the events after the position, ordered by time."""
        events = [item.event for item in self.read()]
        self.ack()
        return sorted(events, key=lambda event: event.time)

    def skip_to_end(self) -> None:
        """Move the position past the existing events."""
        for path in self.folder.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                self.position[path.name] = path.stat().st_size


def read_events(folder: Path, skipped: Counter[str] | None = None) -> list[Event]:
    """Return every event of a run so far, ordered by time. See `Cursor.read`."""
    events = (item.event for item in Cursor(folder).read(skipped))
    return sorted(events, key=lambda event: event.time)


def newest(folder: Path) -> float:
    """Return the time of a folder's newest event that is possible, however late the clock is now.

    A step that starts with the clock of 1970, or long before the last one, still comes after it.
    """
    result = 0.0
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            offset = max(0, path.stat().st_size - _TAIL_BYTES)
            times = [placed.event.time for placed in _tail(path, offset)]
            result = max([result, *(when for when in times if when <= FARTHEST)])
    return result


def problems(folder: Path) -> list[str]:
    """Return the files of a folder from which no event can be read, each with the reason."""
    if os.path.lexists(folder) and not folder.is_dir():
        return [f"{folder}: not a folder"]
    result = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            with open_regular(path) as handle:
                size = handle.seek(0, os.SEEK_END)
        except OSError as error:
            result.append(f"{path}: {error.strerror}")
        else:
            if size and next(_tail(path, 0), None) is None:
                result.append(f"{path}: no event in it")
    return result


def _tail(
    path: Path,
    offset: int,
    skipped: Counter[str] | None = None,
    passed: dict[str, int] | None = None,
) -> Iterator[PositionedEvent]:
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
            yield PositionedEvent(event, path.name, offset)


MAX_WAITING = 10_000
"""Maximum number of events that wait in memory while the disk rejects writes: about 5 MB."""


class Reader(Protocol):
    """Reads a run's events from its files in a separate thread until it is closed."""

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
    happened. This is the run's clock. `by_run_clock` reads it for events that are stored elsewhere.
    """

    def __init__(self, path: Path, *, job_id: str) -> None:
        self.job_id = job_id
        moved = [
            (odd, set_aside(odd))
            for odd, fits in ((path.parent, Path.is_dir), (path, Path.is_file))
            if os.path.lexists(odd) and not fits(odd)
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
        for odd, now in moved:
            message = f"{odd} was not a file that a run writes there; it was moved to {now}"
            self.emit(Warned(stage=path.stem, message=message))

    def emit(self, event: Event) -> None:
        self.append(self.by_run_clock(event))

    def now(self) -> float:
        """Return the time by the run's clock."""
        now, ticks = time.time(), time.monotonic()
        if now < self._clock:
            # It was set back. The time that has passed since the last reading counts too: an event
            # that was created a moment before this call must not be earlier than the last one.
            self._ahead += self._clock + ticks - self._ticks - now
        self._clock, self._ticks = now, ticks
        return now + self._ahead

    def by_run_clock(self, event: Event) -> Event:
        """Return the event with its time by the run's clock instead of this machine's."""
        before = self._ahead
        self.now()
        times = ((name, getattr(event, name)) for name in event.moments)
        # A time after the clock's was read before the clock was set back.
        moved = {
            name: min(when + (before if when > self._clock else self._ahead), LATEST)
            for name, when in times
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
                self._write(self._line(self.by_run_clock(self._warning())))
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
        path = Path(self.handle.name)
        lost = f"; {self._dropped} of them are lost" if self._dropped else ""
        return Warned(
            stage=path.stem,
            message=f"{path} could not be written for a while: {self._refusal}{lost}",
        )


def _torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line."""
    with path.open("rb") as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return False
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) != b"\n"
