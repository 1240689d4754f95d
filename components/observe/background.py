"""Sinks that read a run's events from its files, in a thread that cannot delay training."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Final

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace

CLOSE_SECONDS: Final = 5.0
"""How long the end of a run waits for the thread."""


class Background(ABC):
    """Works every few seconds until it is closed, and once more then.

    If the work raises an error, it ends with a warning, and training continues.

    Args:
        name: of the thread, and of the file of events that the sink writes.
        every: seconds between two rounds.
    """

    def __init__(self, name: str, workspace: Workspace, *, every: float) -> None:
        self.name, self.workspace, self.every = name, workspace, every
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:  # noqa: B027  a sink that only reads files
        """Do nothing: the thread reads the event from its file."""

    def close(self) -> None:
        """Work once more and end, within CLOSE_SECONDS."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    @abstractmethod
    def work(self) -> None:
        """Read what is new and act on it."""

    def tell(self, *events: Event) -> None:
        """Add events to the run."""
        stream = self.workspace.stream(self.name)
        for event in events:
            stream.emit(event)
        stream.close()

    def _run(self) -> None:
        try:
            while not self._closing.wait(self.every):
                self.work()
            self.work()
        except Exception as error:
            message = f"{self.name} ended: {error}; training continues"
            self.tell(Warned(stage="train", message=redact(message)))
