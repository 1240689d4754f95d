"""What of a run's events MLflow has not been told yet.

The events files are the spool. How far each of them has been told is written
down when MLflow has taken a batch, so that whoever goes on, this supervisor or
the next, begins there: a batch is told again only where its answer was lost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import Field, TypeAdapter

from steadytrain.components.shared.events import Event, unread
from steadytrain.components.shared.tracking.notes import exclusive, recall, remember
from steadytrain.components.shared.workspace import Workspace

_OFFSETS = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])
BATCH_EVENTS = 1000
"""Events held in memory at a time, however many wait."""


class Spool:
    """The events of a run that one MLflow run (`parent`) lacks."""

    def __init__(self, workspace: Workspace, parent: str) -> None:
        self.workspace, self.note = workspace, f"{parent}/told"

    @contextlib.contextmanager
    def batch(self, wanted: Callable[[Event], bool]) -> Iterator[list[Event]]:
        """The next wanted events, at most BATCH_EVENTS, in the order of their times.

        They count as told where the block ends without an error. One process,
        or thread, is in the block at a time.

        Raises:
            TrackingError: another stays in the block for long.
        """
        with exclusive(self.workspace, "telling"):
            told = self._told()
            offsets, events = dict(told), list[Event]()
            for item in unread(self.workspace.events, told):
                offsets[item.file] = item.offset
                if wanted(item.event):
                    events.append(item.event)
                if len(events) == BATCH_EVENTS:
                    break
            yield events
            if offsets != told:
                remember(self.workspace, self.note, json.dumps(offsets))

    def _told(self) -> dict[str, int]:
        """How far each file was told; from the beginning again where the note is damaged."""
        try:
            return _OFFSETS.validate_json(recall(self.workspace, self.note) or "{}")
        except ValueError:
            return {}
