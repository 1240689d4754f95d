"""The one stream of events and its plainest sink: a file of JSON lines.

The file is also the spool: whoever wants a run's events (progress display,
MLflow, the report) reads it, so that no reader can slow or stop the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

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
        self.handle = path.open("a", encoding="utf-8")

    def emit(self, event: Event) -> None:
        self.handle.write(to_json(event, job_id=self.job_id) + "\n")
        self.handle.flush()

    def close(self) -> None:
        self.handle.close()


class Follower:
    """Reads the events of all files of a folder, each once, as they are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[Path, int] = {}

    def skip_to_end(self) -> None:
        """Leaves out what is there already."""
        for path in self.folder.glob("*.jsonl"):
            self.offsets[path] = path.stat().st_size

    def new(self) -> list[Event]:
        """Events appended since the last call, in the order of their times."""
        events = [
            event for path in sorted(self.folder.glob("*.jsonl")) for event in self._tail(path)
        ]
        return sorted(events, key=lambda event: event.time)

    def _tail(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as handle:
            handle.seek(self.offsets.get(path, 0))
            appended = handle.read()
        whole = appended[: appended.rfind(b"\n") + 1]
        self.offsets[path] = self.offsets.get(path, 0) + len(whole)
        yield from parse(whole.decode("utf-8", "replace").splitlines())


def parse(lines: Iterable[str]) -> Iterator[Event]:
    """The events of lines; a line torn by a kill, or of a newer version, is left out."""
    for line in lines:
        try:
            yield from_json(line)
        except (ValueError, TypeError):
            continue


def read_events(folder: Path) -> list[Event]:
    """Every event of a run so far, in the order of their times."""
    return Follower(folder).new()
