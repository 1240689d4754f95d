"""The events of a run that MLflow does not have yet.

The event files are the spool. When MLflow has accepted a batch, the offset in each file is saved.
This supervisor, or the next, continues from there. A batch is sent twice only if its response was
lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, NamedTuple, Protocol, TypeVar

from pydantic import Field, TypeAdapter

from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.tracking.notes import RUN, exclusive, recall, remember
from steadytrain.components.shared.workspace import Workspace

_NUMBERS = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])
BATCH_EVENTS = 1000
"""Maximum number of events in memory, however many wait."""


class OfAttempt(Protocol):
    """An event of an attempt."""

    @property
    def attempt(self) -> int: ...


E = TypeVar("E", bound=OfAttempt)


def by_attempt(events: Iterable[E]) -> Iterator[tuple[int, Iterator[E]]]:
    """Yield each attempt with its events, in their order."""
    ordered = sorted(events, key=lambda event: event.attempt)
    yield from itertools.groupby(ordered, key=lambda event: event.attempt)


class Waiting(NamedTuple):
    """What MLflow lacks: bytes of event files, and the time of the oldest event (0: none)."""

    bytes: int
    oldest: float


def waiting(workspace: Workspace) -> Waiting:
    """Return what the run's current MLflow run lacks. It asks no server."""
    parent = recall(workspace, RUN)
    sent = Spool(workspace, parent).sent() if parent else {}
    size = 0
    for path in workspace.events.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            size += max(0, path.stat().st_size - sent.get(path.name, 0))
    first = next(Cursor(workspace.events, sent).read(), None)
    return Waiting(size, first.event.time if first else 0.0)


class Spool:
    """The events that one MLflow run (`parent`) lacks."""

    def __init__(self, workspace: Workspace, parent: str) -> None:
        self.workspace, self.note = workspace, f"{parent}/told"

    @contextlib.contextmanager
    def batch(self, wanted: Callable[[Event], bool]) -> Iterator[list[Event]]:
        """Yield the next wanted events, at most BATCH_EVENTS, ordered by time.

        They count as sent if the block ends without an error. Only one process or thread is in the
        block at a time.

        Raises:
            TrackingError: if another one stays in the block for too long.
        """
        with exclusive(self.workspace, "telling"):
            cursor = Cursor(self.workspace.events, self.sent())
            yield cursor.batch(BATCH_EVENTS, wanted)
            if cursor.ack():
                remember(self.workspace, self.note, json.dumps(cursor.place))

    def sent(self) -> dict[str, int]:
        """Return the sent offset of each file. If the note is damaged, start from the beginning."""
        return numbers_in(self.workspace, self.note)


def numbers_in(workspace: Workspace, note: str) -> dict[str, int]:
    """Return the numbers by name in a note; none if it is missing or damaged."""
    try:
        return _NUMBERS.validate_json(recall(workspace, note) or "{}")
    except ValueError:
        return {}
