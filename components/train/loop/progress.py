"""Training progress: its best result, losses that end it, and the events of rank 0 about both."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol

import psutil

from steadytrain.components.shared.bounded import peak_memory
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    AttemptOutcome,
    CheckpointSaved,
    TrainingDiverged,
    TrainingFinished,
    Warned,
)
from steadytrain.components.shared.records import TRAINING_LOSS
from steadytrain.components.tasks.checks import (
    chosen_metric,
    greater_is_better,
    metric_problem,
)
from steadytrain.components.train.checkpoint.saver import Saved
from steadytrain.components.train.failures import Diverged


@dataclass(frozen=True)
class ExportedChoice:
    """The model to export: its step, its score by `metric`, and whether it is an average."""

    step: int
    metric: str
    score: float
    averaged: bool = False


@dataclass
class Progress:
    """Progress that a checkpoint stores.

    step: optimizer steps done.
    best_step, best_score: of the best validation so far.
    worse: number of validations in a row without a better score.
    window_loss, window_weight: sums of loss and targets since the last reported step.
    best_averaged, last_averaged: whether the score is that of averaged weights.
    last_score: score of the last validation.
    last_loss: mean loss of the last step.
    first_loss: mean loss of the first step.
    recent_losses: mean losses of the last steps, the newest last.
    """

    step: int = 0
    best_step: int = 0
    best_score: float | None = None
    last_score: float | None = None
    last_loss: float = 0.0
    worse: int = 0
    window_loss: float = 0.0
    window_weight: float = 0.0
    first_loss: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    best_averaged: bool = False
    last_averaged: bool = False

    def as_state(self) -> dict[str, Any]:
        return asdict(self)

    def note_loss(self, mean: float, *, keep: int) -> None:
        """Record a step's mean loss. Keep the last `keep` of them."""
        self.last_loss = mean
        if self.first_loss is None:
            self.first_loss = mean
        self.recent_losses = [*self.recent_losses, mean][-keep:]

    def note(
        self,
        score: float,
        training: TrainingConfig,
        *,
        greater_is_better: bool,
        averaged: bool = False,
    ) -> bool:
        """Record a validation's score. Return whether it is the best so far.

        Early stopping counts like Transformers' EarlyStoppingCallback: only a score that is better
        by more than the threshold resets the patience.
        """
        self.last_score, self.last_averaged = score, averaged
        if averaged and training.averaging.export == "averaged" and not self.best_averaged:
            # Only the average may be exported, so scores from before it began do not count.
            self.best_score = None
        gain = self._gain(score, greater_is_better)
        self.worse = 0 if gain > training.early_stopping_threshold else self.worse + 1
        if gain > 0:
            self.best_step, self.best_score, self.best_averaged = self.step, score, averaged
        return gain > 0

    def out_of_patience(self, training: TrainingConfig) -> bool:
        patience = training.early_stopping_patience
        return patience is not None and self.worse >= patience

    def best(self, metric: str, training: TrainingConfig) -> ExportedChoice:
        """Return which model would be exported now.

        Args:
            metric: the one that the scores are of.
        """
        if training.load_best_model_at_end and self.best_score is not None:
            return ExportedChoice(self.best_step, metric, self.best_score, self.best_averaged)
        return self.last(metric)

    def last(self, metric: str) -> ExportedChoice:
        """Return the last model."""
        if self.last_score is not None:
            return ExportedChoice(self.step, metric, self.last_score, self.last_averaged)
        return ExportedChoice(self.step, TRAINING_LOSS, self.last_loss)

    def _gain(self, score: float, greater_is_better: bool) -> float:
        if not math.isfinite(score):
            return -math.inf
        if self.best_score is None:
            return math.inf
        return score - self.best_score if greater_is_better else self.best_score - score


class Judged(Protocol):
    """An object with its own metric, such as a task."""

    metric: str
    greater_is_better: bool


def best_metric(
    training: TrainingConfig, own: Judged, names: Callable[[], Sequence[str]]
) -> tuple[str, bool]:
    """Return the metric that selects the best model, and whether a higher value is better.

    Args:
        names: returns the names of all validation metrics.

    Raises:
        BadInput: there is no such metric, or its direction is unknown.
    """
    metric, given = chosen_metric(training) or own.metric, training.greater_is_better
    known = [metric] if metric == own.metric else names()
    if problem := metric_problem(training, own.metric, known):
        raise BadInput(
            f"{problem.field} = {problem.value}: {problem.message}", remedy=problem.remedy
        )
    if metric == own.metric and given is None:
        return metric, own.greater_is_better
    return metric, bool(greater_is_better(metric, given))


_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""


def highest_normal_loss(
    recent: Sequence[float], first: float | None, *, threshold: float, window: int
) -> float:
    """Return the loss above which a step counts as a spike; infinite until enough steps are known.

    A spike must meet two conditions. First, the loss is more than `threshold` deviations above the
    median of the last `window` losses. This is the rule of OLMo-core's SkipStepOptimizer (window
    128, factor 6, at least half a window), but with median and median absolute deviation instead of
    mean and standard deviation, which a spike would widen (Hampel 1974). Second, the loss gives
    back more than half of the improvement since the first step. Batches differ, and one hard batch
    in a run that has settled is not a divergence.

    Args:
        recent: mean losses of the previous steps; non-finite ones are ignored.
        first: mean loss of the first step.
    """
    finite = [loss for loss in recent[-window:] if math.isfinite(loss)]
    if threshold <= 0 or first is None or len(finite) < max(2, window // 2):
        return math.inf
    middle = median(finite)
    deviation = _TO_SIGMA * median(abs(loss - middle) for loss in finite)
    return middle + max(threshold * deviation, (first - middle) / 2)


class Emitter:
    """Emits events if there is a stream. Safe to use from any thread."""

    def __init__(self, stream: EventStream | None, attempt: int) -> None:
        self.stream, self.attempt = stream, attempt
        self._process = psutil.Process()
        self._memory, self._measured = 0, -math.inf
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        if self.stream is not None:
            with self._lock:
                self.stream.emit(event)

    def saved(self, saved: Saved) -> None:
        """Report a checkpoint. The thread that writes checkpoints calls this."""
        self.emit(
            CheckpointSaved(
                attempt=self.attempt,
                step=saved.checkpoint.step,
                checkpoint=str(saved.checkpoint),
                bytes=saved.bytes,
                seconds=saved.blocking_seconds,
                writing_seconds=saved.writing_seconds,
                waited_seconds=saved.waited_seconds,
            )
        )

    def diverged(self, error: Diverged) -> None:
        self.emit(TrainingDiverged(attempt=self.attempt, step=error.step, loss=error.loss))

    def warn(self, message: str) -> None:
        self.emit(Warned(stage="train", message=message))

    def finished(
        self, progress: Progress, outcome: AttemptOutcome, best_step: int, best_score: float
    ) -> None:
        self.emit(
            TrainingFinished(
                attempt=self.attempt,
                step=progress.step,
                outcome=outcome,
                best_step=best_step,
                best_score=best_score,
                memory_peak=peak_memory(),
            )
        )

    def resident(self) -> int:
        """Return the resident bytes, measured at most once per second.

        A measurement costs as much as a full report.
        """
        now = time.monotonic()
        if now - self._measured >= 1:
            self._memory, self._measured = self._process.memory_info().rss, now
        return self._memory

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
