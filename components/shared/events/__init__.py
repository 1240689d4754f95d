"""One typed stream of events, many sinks. The events themselves are in `types`."""

from steadytrain.components.shared.events.stream import (
    EventStream,
    Follower,
    JsonLines,
    Sink,
    problems,
    read_events,
    unread,
)
from steadytrain.components.shared.events.types import Event

__all__ = [
    "Event",
    "EventStream",
    "Follower",
    "JsonLines",
    "Sink",
    "problems",
    "read_events",
    "unread",
]
