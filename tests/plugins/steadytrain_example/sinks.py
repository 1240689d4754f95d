"""A sink that counts events, and one that fails to open."""

import json
from collections import Counter

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.workspace import Workspace


class EventCounts:
    """Writes the number of events of each kind to a file in the run's folder."""

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.file = workspace.folder / "event-counts.json"
        self.counts: Counter[str] = Counter()

    def emit(self, event: Event) -> None:
        self.counts[type(event).__name__] += 1

    def close(self) -> None:
        self.file.write_text(json.dumps(self.counts))


def never_opens(config: RunConfig, workspace: Workspace) -> EventCounts:
    raise ConnectionError("nobody answers")
