"""One typed stream of events, many sinks. The events themselves are in `types`."""

from steadytrain.components.shared.events.stream import (
    Cursor,
    EventStream,
    JsonLines,
    Reader,
    Sink,
    problems,
    read_events,
)
from steadytrain.components.shared.events.types import Event

__all__ = [
    "Cursor",
    "Event",
    "EventStream",
    "JsonLines",
    "Reader",
    "Sink",
    "problems",
    "read_events",
]
