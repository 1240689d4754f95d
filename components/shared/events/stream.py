"""The one stream of events and its plainest sink: a file of JSON lines.

The file is also the spool: whoever wants a run's events (progress display,
MLflow, the report) reads it, so that no reader can slow or stop the writer.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from steadytrain.components.shared.events.types import Event, from_json, to_json


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
    """Appends each event to a file as a line of JSON, whole lines only."""

    def __init__(self, path: Path, *, job_id: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.job_id = job_id
        self.handle = path.open("ab")
        if _torn(path):
            # A writer died in the middle of a line: what follows must not be lost with it.
            self.handle.write(b"\n")

    def emit(self, event: Event) -> None:
        self.handle.write(f"{to_json(event, job_id=self.job_id)}\n".encode())
        self.handle.flush()

    def close(self) -> None:
        self.handle.close()


class Follower:
    """Reads the events of all files of a folder, each once, as they are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[str, int] = {}

    def skip_to_end(self) -> None:
        """Leaves out what is there already."""
        for path in self.folder.glob("*.jsonl"):
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
    """Whole lines; one that a kill has torn, or of a newer version, is left out."""
    with path.open("rb") as handle:
        handle.seek(offset)
        for line in handle:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                event = from_json(line.decode("utf-8", "replace"))
            except (ValueError, TypeError):
                continue
            yield Placed(event, path.name, offset)


def _torn(path: Path) -> bool:
    """Whether the file ends within a line."""
    with path.open("rb") as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return False
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) != b"\n"
