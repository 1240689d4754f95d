"""What rank 0 tells about the training; the other ranks are silent."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict

import psutil
import torch

from steadytrain.components.shared.events import Event, EventStream
from steadytrain.components.shared.events.types import (
    AttemptOutcome,
    CheckpointSaved,
    GradientOverflow,
    TrainingDiverged,
    TrainingFinished,
    TrainingStarted,
    TrainingStep,
    Validated,
    Warned,
)
from steadytrain.components.train.checkpoint.saver import Saved
from steadytrain.components.train.loop.errors import Diverged
from steadytrain.components.train.loop.progress import Progress
from steadytrain.components.train.loop.setup import Parts, precision
from steadytrain.components.train.loop.steps import StepResult


class Reporter:
    """Emits events where there is a stream; from any thread."""

    def __init__(self, stream: EventStream | None, attempt: int) -> None:
        self.stream, self.attempt = stream, attempt
        self.tokens = 0
        self._window_tokens, self._window_places, self._window_seconds = 0, 0, 0.0
        self._process = psutil.Process()
        self._memory, self._measured = 0, -math.inf
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        if self.stream is not None:
            with self._lock:
                self.stream.emit(event)

    def started(self, parts: Parts, progress: Progress) -> None:
        device = parts.accelerator.device
        self.emit(
            TrainingStarted(
                attempt=self.attempt,
                step=progress.step,
                max_steps=parts.steps,
                parameters=parts.parameters,
                device=torch.cuda.get_device_name() if device.type == "cuda" else str(device),
                precision=precision(parts.config),
                recipe=[asdict(item) for item in parts.recipe],
            )
        )

    def count(self, tokens: int, places: int, seconds: float) -> None:
        """Counts a step's work; validation and saving are not in its time.

        Args:
            places: of tokens, padding included.
        """
        self.tokens += tokens
        self._window_tokens += tokens
        self._window_places += places
        self._window_seconds += seconds

    def step(self, parts: Parts, progress: Progress, result: StepResult) -> None:
        """Reports the steps since the last report."""
        rate = self._window_tokens / self._window_seconds
        padding = 1 - self._window_tokens / self._window_places
        self._window_tokens, self._window_places, self._window_seconds = 0, 0, 0.0
        on_gpu = parts.accelerator.device.type == "cuda"
        self.emit(
            TrainingStep(
                attempt=self.attempt,
                step=progress.step,
                epoch=epoch(parts, progress.step),
                loss=progress.window_loss / progress.window_weight,
                learning_rate=result.learning_rate,
                grad_norm=result.grad_norm,
                tokens=self.tokens,
                tokens_per_second=rate,
                padding=padding,
                gpu_memory_used=torch.cuda.memory_allocated() if on_gpu else 0,
                memory_used=self._resident(),
            )
        )

    def validated(
        self, parts: Parts, progress: Progress, metrics: dict[str, float], best: bool
    ) -> None:
        self.emit(
            Validated(
                attempt=self.attempt,
                step=progress.step,
                epoch=epoch(parts, progress.step),
                metrics=metrics,
                best=best,
            )
        )

    def saved(self, saved: Saved) -> None:
        """Called by the thread that writes checkpoints."""
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

    def overflow(self, parts: Parts, progress: Progress) -> None:
        self.emit(
            GradientOverflow(
                attempt=self.attempt,
                step=progress.step,
                scale=parts.strategy.scale,
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

    def _resident(self) -> int:
        """Resident bytes, asked for once a second at most: that costs as much as a whole report."""
        now = time.monotonic()
        if now - self._measured >= 1:
            self._memory, self._measured = self._process.memory_info().rss, now
        return self._memory

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def epoch(parts: Parts, step: int) -> float:
    """Passes over the training side that `step` optimizer steps make."""
    return step * parts.config.training.global_batch_size / len(parts.train)
