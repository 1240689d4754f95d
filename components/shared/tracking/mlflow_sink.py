"""MLflow as a sink of the event stream: a child run for each attempt, with its metrics by step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.points import Curved, Pointed, axis_position, points
from steadytrain.components.shared.events.types import (
    Adjusted,
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    TrainingStarted,
)
from steadytrain.components.shared.paths import below
from steadytrain.components.shared.tracking.batches import Batches, flatten, key, value
from steadytrain.components.shared.tracking.connect import (
    PARENT,
    Tracking,
    open_tracking,
    short_timeouts,
    tracking_errors,
)
from steadytrain.components.shared.tracking.notes import (
    Spool,
    attempt_note,
    by_attempt,
    numbers_in,
    remember,
)
from steadytrain.components.shared.tracking.run import continue_run, settled_run
from steadytrain.components.shared.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.entities import Metric
from steadytrain.components.shared.tracking.pull_sink import PullSink, SinkTiming

_AttemptEvent = AttemptStarted | TrainingStarted | Pointed | AttemptEnded | DecisionMade | Adjusted

_STATUS = {
    "finished": "FINISHED",
    "early_stopped": "FINISHED",
    "pruned": "FINISHED",
    "preempted": "KILLED",
    "stopped": "KILLED",
    "failed": "FAILED",
}


def wanted(event: Event) -> bool:
    """Return whether such events go to MLflow."""
    return event.in_place if isinstance(event, DecisionMade) else isinstance(event, _AttemptEvent)


class Delivery:
    """Sends the run's events to an open store. Methods raise TrackingError if the store fails.

    After such an error, create a new Delivery: the store may have accepted the last batch.
    """

    def __init__(self, tracking: Tracking, workspace: Workspace, parent: str) -> None:
        self.tracking, self.workspace, self.parent = tracking, workspace, parent
        self.client = tracking.client
        self.spool, self.batches = Spool(workspace, parent), Batches(tracking, workspace, parent)
        self._runs: dict[int, str] = {}
        self._certain = False

    def catch_up(self, *, give_up: Callable[[], bool] = lambda: False) -> int:
        """Send what MLflow lacks, batch by batch. Stop if `give_up` returns true before a batch.

        Returns:
            The number of events sent.
        """
        sent = 0
        while not give_up():
            with self.spool.batch(wanted) as events:
                if not events:
                    break
                self._send(events)
            self._certain = True
            sent += len(events)
        return sent

    def _send(self, events: Iterable[Event]) -> None:
        ours = [cast(_AttemptEvent, event) for event in events]
        with tracking_errors(self.tracking.uri):
            for attempt, group in by_attempt(ours):
                self._send_attempt(attempt, list(group))

    def end_open_attempts(self) -> None:
        """End the MLflow runs of attempts whose supervisor could not report how they ended."""
        with tracking_errors(self.tracking.uri):
            for path in sorted(self._notes().glob("attempt-*")):
                run_id = path.read_text()
                if self.client.get_run(run_id).info.status == "RUNNING":
                    self.client.set_terminated(run_id, "KILLED")

    def _notes(self) -> Path:
        """Return the folder of this MLflow run's notes. Its name is an id that a server chose."""
        return below(self.workspace.tracking, self.parent, origin="MLflow run")

    def _send_attempt(self, attempt: int, events: Sequence[_AttemptEvent]) -> None:
        from mlflow.entities import Metric, Param

        run_id = self._run_of(attempt, start=events[0].time)
        params = [Param(name, text) for event in events for name, text in _params(event)]
        self.batches.send(run_id, params=params)
        filled = [Param(name, text) for event in events for name, text in _filled(event)]
        self.batches.send(self.parent, params=filled)
        metrics = [
            Metric(key(name), number, _milliseconds(event.time), axis_position(event))
            for event in events
            if isinstance(event, Pointed)
            for name, number in points(event)
        ]
        self._send_metrics(run_id, metrics)
        self._extend_curve(events)
        for event in events:
            if isinstance(event, DecisionMade) and event.batch:
                # The run's parameters cannot change any more.
                size = event.batch.micro_batch_size
                self._tag(run_id, {"micro_batch_size": size, "decision": event.reason})
                if event.batch.sequence_length:
                    # What the model learns is no longer what the parameters say.
                    self._tag(self.parent, {"shortened": event.reason})
            if isinstance(event, Adjusted):
                # Of the whole run too, whose parameters name the first value.
                for run in (run_id, self.parent):
                    self._tag(run, {f"adjusted.{event.field}.{event.step}": event.change})
            if isinstance(event, AttemptEnded):
                self._end(run_id, event)

    def _send_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        if metrics and not self._certain:
            metrics = self._lacking(run_id, metrics)
        self.batches.send(run_id, metrics=metrics)

    def _extend_curve(self, events: Sequence[_AttemptEvent]) -> None:
        """Send what comes after the end of the run's own curves."""
        from mlflow.entities import Metric

        note = f"{self.parent}/curve"
        ends, metrics = numbers_in(self.workspace, note), list[Metric]()
        for event in (event for event in events if isinstance(event, Curved)):
            for name, number in points(event):
                if math.isfinite(number) and event.step > ends.get(name, -1):
                    ends[name] = event.step
                    time = _milliseconds(event.time)
                    metrics.append(Metric(key(name), number, time, event.step))
        self._send_metrics(self.parent, metrics)
        if metrics:
            remember(self.workspace, note, json.dumps(ends))

    def _lacking(self, run_id: str, metrics: Sequence[Metric]) -> list[Metric]:
        """Return the metrics that the store lacks. Not every store detects duplicate points."""
        from steadytrain.components.shared.http_client import SECONDS, deadline

        with deadline(SECONDS):  # MLflow itself asks for page after page
            known = {
                (point.key, point.timestamp, point.step)
                for name in {metric.key for metric in metrics}
                for point in self.client.get_metric_history(run_id, name)
            }
        return [item for item in metrics if (item.key, item.timestamp, item.step) not in known]

    def _run_of(self, attempt: int, *, start: float) -> str:
        if attempt not in self._runs:
            self._runs[attempt] = settled_run(
                self.tracking,
                self.workspace,
                attempt_note(self.parent, attempt),
                run_name=f"attempt-{attempt}",
                start_time=_milliseconds(start),
                tags={PARENT: self.parent, "mlflow.source.name": "steadytrain"},
            )
        return self._runs[attempt]

    def _end(self, run_id: str, event: AttemptEnded) -> None:
        about = {
            "outcome": event.outcome,
            "failure_class": event.failure_class,
            "message": event.message,
            "remedy": event.remedy,
        }
        self._tag(run_id, about)
        self.client.set_terminated(run_id, _STATUS[event.outcome], _milliseconds(event.time))

    def _tag(self, run_id: str, about: Mapping[str, object]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"steadytrain.{name}", value(text)) for name, text in about.items() if text]
        self.batches.send(run_id, tags=tags)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _params(event: Event) -> Iterator[tuple[str, str]]:
    if isinstance(event, AttemptStarted):
        yield from flatten(
            {
                "world_size": event.world_size,
                "micro_batch_size": event.batch.micro_batch_size,
                "gradient_accumulation_steps": event.gradient_accumulation_steps,
                "resumed_from_step": event.resumed_from_step,
            }
        )
    elif isinstance(event, TrainingStarted):
        yield from flatten(
            {
                "max_steps": event.max_steps,
                "parameters": event.parameters,
                "device": event.device,
                "precision": event.precision,
                **{item["field"]: item["value"] for item in event.recipe},
            }
        )


def _filled(event: Event) -> Iterator[tuple[str, str]]:
    """Yield parameters that the configuration leaves open and training decides."""
    if isinstance(event, TrainingStarted):
        for item in (Decision(**fields) for fields in event.recipe):
            if item.field == "training.learning_rate" and not item.yours:
                yield item.field, value(item.value)


class MlflowSink(PullSink):
    """Sends training events to MLflow, including those that an earlier sink could not send."""

    def __init__(
        self, config: RunConfig, workspace: Workspace, **timing: Unpack[SinkTiming]
    ) -> None:
        def deliver() -> Delivery:
            tracking = open_tracking(config, workspace)
            return Delivery(tracking, workspace, continue_run(tracking, config, workspace))

        super().__init__("MLflow", workspace, deliver, around=short_timeouts, **timing)
