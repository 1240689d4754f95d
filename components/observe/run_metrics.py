"""A run's metrics, computed from its events alone: of a finished run, or while it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict
from functools import singledispatchmethod
from typing import Any

from steadytrain.components.observe.metrics import (
    FAILURE_CLASSES,
    INTERRUPTED,
    METRICS,
    VALIDATION_PREFIX,
    Samples,
    flops_utilization,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.events import Cursor, Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    DecisionMade,
    GradientOverflow,
    NoiseScaleMeasured,
    PodWaited,
    SupervisorStarted,
    TrainingDiverged,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.shared.tracking.notes import waiting
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.outcome import SUCCESSES
from steadytrain.components.train.recovery.times import Times, spans


class RunMetrics:
    """Adds up events. An event that it already has changes nothing."""

    def __init__(self) -> None:
        self.samples = Samples.at_zero()
        self.history = History()
        self._attempts: dict[int, AttemptHistory] = {}
        self._alive: dict[int, float] = {}
        self._newest: dict[type[Event], tuple[int, int]] = {}
        self._counted: set[tuple[str, int, int]] = set()
        self._tokens: dict[int, int] = {}
        self._retries: dict[int, int] = {}
        self._clipped: dict[int, int] = {}
        self._prices: dict[int, float] = {}
        self._finished = False
        self._lost = 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunMetrics:
        """Return the metrics of events."""
        metrics = cls()
        for event in events:
            metrics.add(event)
        return metrics

    def add(self, event: Event) -> None:
        """Count an event."""
        self._add(event)
        attempt = getattr(event, "attempt", 0)
        # A decision comes after the end of its attempt.
        if attempt in self._attempts and not isinstance(event, DecisionMade):
            self._live(attempt, event.time)

    def times(self) -> Times:
        """Return how the wall clock was spent, up to the last event."""
        last = self.history.attempts[-1].started.attempt if self.history.attempts else 0
        return Times.of(spans(self.history, until=self._alive.get(last, 0.0)))

    def current(self) -> Samples:
        """Return a copy of all values, with those that follow from the run as a whole."""
        samples = deepcopy(self.samples)
        if self.history.attempts:
            times = self.times()
            samples.set("goodput", times.goodput)
            for phase, seconds in asdict(times).items():
                samples.set("run_seconds", seconds, phase)
            samples.set("run_active", float(self.is_active))
        if self._prices:
            samples.add("cost_usd", self._cost())
        if (share := self._flops_utilization()) is not None:
            samples.set("mfu", share)
        return samples

    @property
    def is_active(self) -> bool:
        """Whether the run trains, or will try again by itself."""
        ended = self.history.attempts[-1].ended if self.history.attempts else None
        if ended is None:
            return bool(self.history.attempts)
        return bool(ended.failure_class) and ended.attempt not in self._stopped

    @property
    def has_ended(self) -> bool:
        """Whether training has finished or failed, and not only been interrupted."""
        ended = self.history.attempts[-1].ended if self.history.attempts else None
        return ended is not None and (ended.outcome in SUCCESSES or ended.attempt in self._stopped)

    @property
    def _stopped(self) -> set[int]:
        """The attempts after which the policy gave up."""
        return {item.attempt for item in self.history.decisions if item.action == "stop"}

    def _cost(self) -> float:
        """Return the cost of the attempts so far, in USD.

        Not summed up event by event: rounding would depend on the order, and Prometheus takes a
        counter that is lower by a rounding error for one that started again from 0.
        """
        return sum(
            price * (self._alive[number] - attempt.started.time - attempt.skipped) / 3600
            for number, price in self._prices.items()
            for attempt in [self._attempts[number]]
        )

    def _flops_utilization(self) -> float | None:
        """Return the model FLOPs utilization of the newest steps; None if it is unknown."""
        number, _ = self._newest.get(TrainingStep, (0, 0))
        attempt = self._attempts.get(number)
        if attempt is None:
            return None
        adapter = self._setting("model", "adapter") or {}
        adapters = adapter.get("kind", "none") != "none"
        speed = self.samples.values["tokens_per_second", ""]
        return flops_utilization(attempt, speed, adapters=adapters)

    def _live(self, attempt: int, time: float) -> None:
        """Note an attempt's last sign of life."""
        started, ended = self._attempts[attempt].started, self._attempts[attempt].ended
        # A rank that was cut off may report for longer than its machine counts.
        time = min(time, ended.time) if ended else time
        self._alive[attempt] = max(self._alive.get(attempt, started.time), time)

    def _is_first(
        self, event: CheckpointSaved | Validated | GradientOverflow | TrainingDiverged
    ) -> bool:
        """Return whether this event was not counted before."""
        key = (event.name, event.attempt, event.step)
        known = key in self._counted
        self._counted.add(key)
        return not known

    def _is_newest(
        self, event: TrainingStep | Validated | CheckpointSaved | NoiseScaleMeasured
    ) -> bool:
        """Return whether no later event of this kind is known: gauges show the newest one."""
        position = (event.attempt, event.step)
        newest = position >= self._newest.get(type(event), (0, 0))
        if newest:
            self._newest[type(event)] = position
        return newest

    @singledispatchmethod
    def _add(self, event: Event) -> None:
        """Ignore an event that no metric is made from."""

    @_add.register
    def _(self, event: SupervisorStarted) -> None:
        before = self.history.supervisor
        if before is None or event.generation >= before.generation:
            self.history.supervisor = event

    @_add.register
    def _(self, event: AttemptStarted) -> None:
        if event.attempt in self._attempts:
            return
        self._attempts[event.attempt] = AttemptHistory(event)
        self.history.attempts.append(self._attempts[event.attempt])
        self.samples.add("attempts", 1)
        self.samples.set("micro_batch_size", event.batch.micro_batch_size)
        self.samples.set("attempt_started_timestamp_seconds", event.time)
        self.samples.set("attempt_ready", 0.0)
        if (price := self._setting("compute", "price_per_hour")) is not None:
            self._prices[event.attempt] = price
        # It may have had to start from an older checkpoint than the newest one.
        self._count_lost()

    @_add.register
    def _(self, event: TrainingStarted) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or attempt.ready is not None:
            return
        attempt.add(event)
        if attempt is self.history.attempts[-1]:
            self.samples.set("attempt_ready", 1.0)
            self.samples.set("training_max_steps", event.max_steps)

    @_add.register
    def _(self, event: AttemptEnded) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or attempt.ended is not None:
            return
        attempt.add(event)
        if event.failure_class:
            self.samples.add("failures", 1, _class(event))
        self._count_lost()
        if event.outcome in SUCCESSES and not self._finished:
            self._finished = True
            self.samples.observe("training_duration_seconds", self.times().wall)

    @_add.register
    def _(self, event: PodWaited) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is not None and attempt.ended is None:
            waited = event.started - attempt.started.time
            attempt.waited = max(attempt.waited, waited)

    @_add.register
    def _(self, event: DecisionMade) -> None:
        # Two supervisors may have decided about the same attempt.
        key = event.attempt, event.in_place and event.batch
        if key in ((item.attempt, item.in_place and item.batch) for item in self.history.decisions):
            return
        self.history.decisions.append(event)
        attempt = self._attempts.get(event.attempt)
        if attempt is not None and event.in_place:
            attempt.add(event)
            self.samples.add("failures", 1, event.failure_class)
            self.samples.set("micro_batch_size", attempt.plan.micro_batch_size)

    @_add.register
    def _(self, event: CheckpointSaved) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or not self._is_first(event):
            return
        attempt.add(event)
        self.samples.observe("checkpoint_size_mb", event.bytes / 1e6)
        self.samples.add("step_seconds", event.seconds, "checkpoint")
        if self._is_newest(event):
            self.samples.set("last_checkpoint_timestamp_seconds", event.time)

    @_add.register
    def _(self, event: TrainingStep) -> None:
        new_tokens = event.tokens - self._tokens.get(event.attempt, 0)
        if new_tokens > 0:
            self._tokens[event.attempt] = event.tokens
            self.samples.add("tokens", new_tokens)
            if event.tokens_per_second > 0:
                self._count_phases(event, new_tokens / event.tokens_per_second)
        retries = event.gpu_memory_retries - self._retries.get(event.attempt, 0)
        if retries > 0:
            self._retries[event.attempt] = event.gpu_memory_retries
            self.samples.add("gpu_memory_retries", retries)
        clipped = event.clipped_steps - self._clipped.get(event.attempt, 0)
        if clipped > 0:
            self._clipped[event.attempt] = event.clipped_steps
            self.samples.add("gradients_clipped", clipped)
        if self._is_newest(event):
            self._show(event)

    @_add.register
    def _(self, event: Validated) -> None:
        if self._is_first(event):
            self.samples.add("step_seconds", event.seconds, "validation")
        if self._is_newest(event):
            for name, score in event.metrics.items():
                if f"{VALIDATION_PREFIX}{name}" in METRICS:
                    self.samples.set(f"{VALIDATION_PREFIX}{name}", score)

    @_add.register
    def _(self, event: NoiseScaleMeasured) -> None:
        if self._is_newest(event) and event.critical_batch_size is not None:
            self.samples.set("critical_batch_size", event.critical_batch_size)

    @_add.register
    def _(self, event: TrainingDiverged) -> None:
        self.samples.add("divergences", float(self._is_first(event)))

    @_add.register
    def _(self, event: GradientOverflow) -> None:
        if event.scale is not None:
            self.samples.add("gradient_overflows", float(self._is_first(event)))

    def _show(self, event: TrainingStep) -> None:
        """Set the gauges to a step's values."""
        show = self.samples.set
        show("training_step", event.step)
        show("training_epoch", event.epoch)
        show("last_step_timestamp_seconds", event.time)
        show("training_loss", event.loss)
        show("learning_rate", event.learning_rate)
        show("gradient_norm", event.grad_norm)
        show("tokens_per_second", event.tokens_per_second)
        show("padding_ratio", event.padding)
        show("host_memory_bytes", event.memory_used)
        if event.gpu_memory_used:
            show("gpu_memory_allocated_bytes", event.gpu_memory_used)
            show("gpu_memory_reserved_bytes", event.gpu_memory_reserved)
            show("gpu_memory_peak_bytes", event.gpu_memory_peak)
        if event.gpu_utilization is not None:
            show("gpu_utilization", event.gpu_utilization)

    def _count_phases(self, event: TrainingStep, seconds: float) -> None:
        """Count the time of the steps since the last report by phase."""
        shares = {
            "data": event.data_wait,
            "communication": event.communication_wait or 0.0,
            "forward": event.forward or 0.0,
            "backward": event.backward or 0.0,
            "optimizer": event.optimizer or 0.0,
        }
        for phase, share in shares.items():
            self.samples.add("step_seconds", share * seconds, phase)
        self.samples.add("step_seconds", (1 - sum(shares.values())) * seconds, "other")

    def _setting(self, section: str, field: str) -> Any:
        """Return a field of the configuration that the newest supervisor uses."""
        supervisor = self.history.supervisor
        return supervisor.settings.get(section, {}).get(field) if supervisor else None

    def _count_lost(self) -> None:
        """Count lost time that is new, for the newest attempt that ended."""
        ended = next((item.ended for item in reversed(self.history.attempts) if item.ended), None)
        lost = self.times().lost
        if ended is not None and lost > self._lost:
            self.samples.add("lost_seconds", lost - self._lost, _class(ended))
            self._lost = lost


def _class(ended: AttemptEnded) -> str:
    """Return the value of the label `class`: one of a fixed number."""
    if not ended.failure_class:
        return INTERRUPTED
    known = ended.failure_class in FAILURE_CLASSES
    return ended.failure_class if known else FailureClass.UNKNOWN.value


def add_present(samples: Samples, config: RunConfig, workspace: Workspace) -> None:
    """Add the budget, and what MLflow lacks now."""
    budget = config.observability.budget_usd
    if budget is not None:
        samples.set("cost_budget_usd", budget)
    if "mlflow" in config.tracking.sinks:
        waits = waiting(workspace)
        samples.set("sink_queue_bytes", waits.bytes)
        oldest = waits.oldest
        samples.set("sink_lag_seconds", max(0.0, time.time() - oldest) if oldest else 0.0)


class LiveMetrics:
    """Follows a run's events, and computes its metrics from all of them."""

    def __init__(self, config: RunConfig, workspace: Workspace) -> None:
        self.config, self.workspace = config, workspace
        self._metrics, self._lock = RunMetrics(), threading.Lock()
        self._cursor = Cursor(workspace.events)

    @property
    def has_ended(self) -> bool:
        return self._metrics.has_ended

    def read(self) -> None:
        """Add the new events."""
        for item in self._cursor.read():
            with self._lock:
                self._metrics.add(item.event)
        self._cursor.ack()

    def samples(self) -> Samples:
        """Return the current values, in any thread."""
        with self._lock:
            samples = self._metrics.current()
        add_present(samples, self.config, self.workspace)
        return samples
