"""The spans that a collector lacks, from the run's event files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from steadytrain.components.observe.otlp.spans import RunSpans, Span, left_out
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import AttemptEnded, AttemptStarted
from steadytrain.components.shared.tracking.trace import Trace


class SpanReader:
    """Reads the spans of a run, each once, as they become complete.

    The event files are the queue. It reads them from their beginning, because a span may have begun
    before another process sent the last one.

    Args:
        folder: of the event files.
        sent: offset in each file up to which the collector has everything.
    """

    def __init__(self, folder: Path, trace: Trace, sent: Mapping[str, int]) -> None:
        self.folder, self.trace, self.sent = folder, trace, sent
        self.cursor = Cursor(folder)
        self._spans = RunSpans(trace)
        self._began: dict[int, dict[str, int]] = {}

    def new(self) -> Iterator[Span]:
        """Yield the spans that are complete by now, except those that an earlier call yielded."""
        for item in self.cursor.read():
            is_sent = item.offset <= self.sent.get(item.file, 0)
            for span in self._of(item.event, steps=not is_sent):
                if not is_sent:
                    yield span
            self.cursor.ack()

    def _of(self, event: Event, *, steps: bool) -> Iterator[Span]:
        """Yield the spans that are complete with an event; after a failure, those of all steps."""
        yield from self._spans.add(event)
        if isinstance(event, AttemptStarted):
            self._began[event.attempt] = self.cursor.place
        elif isinstance(event, AttemptEnded):
            began = self._began.pop(event.attempt, {})
            if event.failure_class and steps:
                events = (item.event for item in Cursor(self.folder, began).read())
                yield from left_out(self.trace, event.attempt, events)
