"""Events of rank 0 that do not depend on what it trains with. The other ranks report nothing."""

from __future__ import annotations

import math
import threading
import time

import psutil

from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    AttemptOutcome,
    CheckpointSaved,
    TrainingDiverged,
    TrainingFinished,
    Warned,
)
from steadytrain.components.train.checkpoint.saver import Saved
from steadytrain.components.train.errors import Diverged
from steadytrain.components.train.loop.progress import Progress


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
