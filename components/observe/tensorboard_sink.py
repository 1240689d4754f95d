"""TensorBoard as a sink of the event stream: one event file for each attempt."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Unpack, cast

from pydantic import BaseModel, Field

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.points import Histogram, Shown, shown_at
from steadytrain.components.shared.tracking.notes import (
    BATCH_EVENTS,
    by_attempt,
    exclusive,
    recall,
    remember,
)
from steadytrain.components.shared.tracking.pull_sink import PullSink, SinkTiming, check_package
from steadytrain.components.shared.workspace import Workspace

FOLDER: Final = "tensorboard"
"""In the run's folder. `tensorboard --logdir <output>/runs` shows all runs."""

_NOTE = "tensorboard"
_FILE = "events.out.tfevents.steadytrain"
_Size = Annotated[int, Field(ge=0)]


class _Written(BaseModel):
    """How far the run's events have been written, and how long each file is with that."""

    offsets: dict[str, _Size] = {}
    sizes: dict[str, _Size] = {}


class TensorBoardDelivery:
    """Appends a run's points to event files.

    The note about what has been written includes the length of each file. Whatever follows after
    that length comes from a process that died before it wrote the note, and is cut off first. So
    each point is there once.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.folder = workspace, workspace.folder / FOLDER

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Write what is missing. Stop if `give_up` returns true before a batch.

        Raises:
            TrackingError: a file cannot be written.
        """
        try:
            while not give_up() and self._write_batch():
                pass
        except OSError as error:
            raise TrackingError(
                f"{error.filename or self.folder} cannot be written: {error.strerror}",
                remedy="free space there, or remove tensorboard from tracking.sinks",
            ) from error

    def _write_batch(self) -> bool:
        """Return whether there was anything to write."""
        with exclusive(self.workspace, "tensorboard"):
            before = self._written()
            cursor = Cursor(self.workspace.events, before.offsets)
            events = cursor.batch(BATCH_EVENTS, _has_points)
            if not events:
                return False
            self._cut(before.sizes)
            ours = [cast(Shown, event) for event in events]
            sizes = dict(before.sizes)
            for attempt, group in by_attempt(ours):
                name = f"attempt-{attempt}"
                sizes[name] = _append(self.folder / name / _FILE, group)
            cursor.ack()
            note = _Written(offsets=cursor.position, sizes=sizes)
            remember(self.workspace, _NOTE, note.model_dump_json())
            return True

    def _written(self) -> _Written:
        """Return the note. If it is damaged, everything is written again."""
        try:
            return _Written.model_validate_json(recall(self.workspace, _NOTE) or "{}")
        except ValueError:
            return _Written()

    def _cut(self, sizes: dict[str, int]) -> None:
        for path in self.folder.glob(f"*/{_FILE}"):
            if path.stat().st_size > sizes.get(path.parent.name, 0):
                os.truncate(path, sizes.get(path.parent.name, 0))


class TensorBoardSink(PullSink):
    """Writes training events for TensorBoard, including those that an earlier sink did not write.

    Raises:
        BadInput: TensorBoard is not installed.
    """

    def __init__(
        self,
        config: RunConfig,  # noqa: ARG002  as for every sink
        workspace: Workspace,
        **timing: Unpack[SinkTiming],
    ) -> None:
        check_package("tensorboard")
        delivery = TensorBoardDelivery(workspace)
        super().__init__("TensorBoard", workspace, lambda: delivery, **timing)


def _has_points(event: Event) -> bool:
    return isinstance(event, Shown)


def _append(path: Path, events: Iterable[Shown]) -> int:
    """Append events to a file. Return its length."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    records = RecordWriter(content)
    with path.open("ab") as file:
        if not file.tell():
            records.write(event_pb2.Event(file_version="brain.Event:2").SerializeToString())
        for event in events:
            values = [
                summary_pb2.Summary.Value(tag=name, **_value(shown))
                for name, shown in shown_at(event)
            ]
            summary = summary_pb2.Summary(value=values)
            record = event_pb2.Event(wall_time=event.time, step=event.step, summary=summary)
            records.write(record.SerializeToString())
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _value(shown: float | Histogram) -> dict[str, Any]:
    """Return the field of a summary's value that has a number or a histogram."""
    from tensorboard.compat.proto import summary_pb2

    if not isinstance(shown, Histogram):
        return {"simple_value": shown}
    edges = shown.edges
    return {
        "histo": summary_pb2.HistogramProto(
            min=shown.low,
            max=shown.high,
            num=sum(shown.counts),
            bucket_limit=edges[1:],
            bucket=shown.counts,
        )
    }
