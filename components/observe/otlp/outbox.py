"""Batches of what follows from a run's events, and a note of what has been sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from steadytrain.components.observe.otlp.collector import Rejected
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.tracking.notes import exclusive, remember, warn
from steadytrain.components.shared.workspace import Workspace

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Reads a run's event files.

    cursor: everything up to its place has been yielded by `new`.
    """

    cursor: Cursor

    def new(self) -> Iterator[T_co]:
        """Yield what has been added. It is exhausted before the next call."""


class Outbox(Generic[T]):
    """Sends what a source yields, in batches.

    The event files are the queue. A batch that is not accepted stays here, and nothing is read
    until it is; one that is rejected for good is dropped with a warning, which comes once. A batch
    is sent twice only if this process died before it noted the answer.

    Args:
        note: name of the note with the offsets of what has been sent.
        size: most items in memory.
        send: raises TrackingError if a batch is not accepted, Rejected if it never will be.
    """

    def __init__(
        self,
        workspace: Workspace,
        note: str,
        source: Source[T],
        size: int,
        send: Callable[[Sequence[T]], None],
    ) -> None:
        self.workspace, self.note, self.source = workspace, note, source
        self.size, self.send = size, send
        self._items: Iterator[T] = iter(())
        self._batch: list[T] = []
        self._warned = False

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Send what is there. Stop if `give_up` returns true before a batch.

        Raises:
            TrackingError: a batch was not accepted, or another process of the run is sending.
            StorageError: the note cannot be written.
        """
        self._send_all(give_up)
        if not give_up():
            self._items = self.source.new()
            self._send_all(give_up)

    def _send_all(self, give_up: Callable[[], bool]) -> None:
        while not give_up():
            self._batch = self._batch or list(islice(self._items, self.size))
            if not self._batch:
                break
            with exclusive(self.workspace, "exporting"):
                try:
                    self.send(self._batch)
                except Rejected as error:
                    self._warn(error)
                self._batch = []
                remember(self.workspace, self.note, json.dumps(self.source.cursor.place))

    def _warn(self, error: Rejected) -> None:
        if not self._warned:
            self._warned = True
            warn(self.workspace, f"{error.message}; {error.remedy}")
