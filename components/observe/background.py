"""Sinks that read a run's events from its files, in a thread that cannot delay training."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.periodic import Periodic
from steadytrain.components.shared.workspace import Workspace

CLOSE_SECONDS: Final = 5.0
"""How long the end of a run waits for the thread."""


class Background(ABC):
    """Works every few seconds until it is closed, and once more then.

    If the work raises an error, it ends with a warning, and training continues.

    Args:
        name: of the thread, and of the file of events that the sink writes.
        every: seconds between two rounds.
        close_seconds: how long `close` waits for the thread.
    """

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        *,
        every: float,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.name, self.workspace, self.close_seconds = name, workspace, close_seconds
        self._thread = Periodic(
            name, self.work, every=every, finish=self.finish, around=self.guarded
        )

    def close(self) -> None:
        """Work once more and end, within `close_seconds`."""
        self._thread.end(self.close_seconds)

    @abstractmethod
    def work(self) -> None:
        """Read what is new and act on it."""

    def finish(self) -> None:
        """Work for the last time."""
        self.work()

    def add_events(self, *events: Event) -> None:
        """Add events to the run."""
        self.workspace.add_events(self.name, *events)

    def warn(self, message: str) -> None:
        """Add a warning to the run's events."""
        self.add_events(Warned(stage="train", message=redact(message)))

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn an error of the thread into a warning."""
        try:
            yield
        except Exception as error:
            self.warn(f"{self.name} ended: {error}; training continues")
