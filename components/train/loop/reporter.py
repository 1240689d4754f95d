"""Reports from rank 0 about training. The other ranks report nothing."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from steadytrain.components.memory.model import architecture_of, label_count
from steadytrain.components.memory.random_model import measure_latency
from steadytrain.components.shared.environment import environment
from steadytrain.components.shared.events import EventStream, read_events
from steadytrain.components.shared.events.types import (
    CLIPPED_SHARE,
    CLIPPED_STEPS,
    GradientOverflow,
    LatencyMeasured,
    TrainingStarted,
    TrainingStep,
    Validated,
    WorkProgress,
)
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.train.loop.progress import Emitter, Progress
from steadytrain.components.train.loop.setup import TrainingSetup
from steadytrain.components.train.loop.steps import StepResult
from steadytrain.components.train.loop.usage import gpu_use


@dataclass
class Clipping:
    """The steps of an attempt whose gradients were clipped.

    count: of all its steps.
    """

    count: int = 0
    _seen: int = 0
    _before: int = 0
    _often: bool = False

    def note(self, *, clipped: bool) -> float | None:
        """Count a step.

        Returns:
            The share of clipped steps in the last CLIPPED_STEPS, if it is above CLIPPED_SHARE now
            and was not in those before. Otherwise None.
        """
        self.count += clipped
        self._seen += 1
        if self._seen % CLIPPED_STEPS:
            return None
        share, self._before = (self.count - self._before) / CLIPPED_STEPS, self.count
        before, self._often = self._often, share > CLIPPED_SHARE
        return share if self._often and not before else None


@dataclass
class _Window:
    """The steps since the last report."""

    tokens: int = 0
    places: int = 0
    seconds: float = 0.0
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    waits: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def shares(self) -> dict[str, Any]:
        """Return the fields of `TrainingStep` that are shares of the time."""
        shares = {
            "data_wait": self.data,
            "forward": self.forward,
            "backward": self.backward,
            "optimizer": self.optimizer,
        }
        result: dict[str, Any] = {name: value / self.seconds for name, value in shares.items()}
        if self.waits:
            slowest = min(self.waits, key=self.waits.__getitem__)
            result["communication_wait"] = sum(self.waits.values()) / len(self.waits) / self.seconds
            result["slowest_rank"] = slowest
            result["slowest_rank_wait"] = self.waits[slowest] / self.seconds
        return result


class Reporter(Emitter):
    """Reports training with PyTorch."""

    def __init__(self, stream: EventStream | None, attempt: int) -> None:
        super().__init__(stream, attempt)
        self.tokens = 0
        self._window, self._clipping = _Window(), Clipping()
        self._worked = -math.inf

    def worked(self, work: str, done: int, total: int) -> None:
        """Report how many rows another model has worked on, at most once per second."""
        now = time.monotonic()
        if done == total or now - self._worked >= 1:
            self._worked = now
            self.emit(WorkProgress(stage="train", work=work, done=done, total=total, unit="rows"))

    def started(self, parts: TrainingSetup, progress: Progress) -> None:
        self.emit(
            TrainingStarted(
                attempt=self.attempt,
                step=progress.step,
                max_steps=parts.steps,
                parameters=parts.parameters,
                device=_name_of(parts.accelerator.device),
                precision=parts.config.training.precision,
                recipe=[asdict(item) for item in parts.recipe],
                groups=[asdict(item) for item in parts.groups],
                joined=parts.joined,
                environment=environment(),
            )
        )

    def latency(self, parts: TrainingSetup, workspace: Workspace) -> None:
        """Measure a sequence's latency, unless an earlier attempt of the run has."""
        if any(isinstance(event, LatencyMeasured) for event in read_events(workspace.events)):
            return
        config, length = parts.config, parts.config.data.sequence_length
        with parts.accelerator.device:
            milliseconds = measure_latency(
                architecture_of(config.model), label_count(config), length
            )
        self.emit(
            LatencyMeasured(
                attempt=self.attempt,
                milliseconds=milliseconds,
                sequence_length=length,
                device=_name_of(parts.accelerator.device),
            )
        )

    def count(
        self, tokens: int, places: int, seconds: float, data: float, result: StepResult
    ) -> None:
        """Count a step's work. The time excludes validation and saving.

        Args:
            places: number of tokens, including padding.
            seconds: duration of the step.
            data: how much of it was spent waiting for data.
            result: the step's result.
        """
        window, phases = self._window, result.phases
        self.tokens += tokens
        window.tokens += tokens
        window.places += places
        window.seconds += seconds
        window.data += data
        window.forward += phases.forward
        window.backward += phases.backward
        window.optimizer += phases.optimizer
        for rank, waited in enumerate(result.waits):
            window.waits[rank] += waited

    def gradients(self, parts: TrainingSetup, progress: Progress, result: StepResult) -> None:
        """Count a step that was clipped, and report one that overflowed."""
        if result.overflow:
            self._overflow(progress, scale=parts.strategy.scale)
        limit = parts.config.training.max_grad_norm or math.inf
        share = self._clipping.note(clipped=limit < result.grad_norm < math.inf)
        if share is not None:
            self._overflow(progress, clipped=share, steps=CLIPPED_STEPS)

    def step(self, parts: TrainingSetup, progress: Progress, result: StepResult) -> None:
        """Report the steps since the last report."""
        window, self._window = self._window, _Window()
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
                tokens_per_second=window.tokens / window.seconds,
                padding=1 - window.tokens / window.places,
                memory_used=self.resident(),
                clipped_steps=self._clipping.count,
                **window.shares(),
                **(gpu_use() if on_gpu else {"gpu_memory_used": 0}),
            )
        )

    def validated(
        self,
        parts: TrainingSetup,
        progress: Progress,
        metrics: dict[str, float],
        *,
        best: bool,
        seconds: float,
    ) -> None:
        self.emit(
            Validated(
                attempt=self.attempt,
                step=progress.step,
                epoch=epoch(parts, progress.step),
                metrics=metrics,
                best=best,
                seconds=seconds,
            )
        )

    def _overflow(self, progress: Progress, **what: Any) -> None:
        self.emit(GradientOverflow(attempt=self.attempt, step=progress.step, **what))


def epoch(parts: TrainingSetup, step: int) -> float:
    """Return how many passes over the training data `step` optimizer steps make."""
    return step * parts.config.training.global_batch_size / len(parts.train)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else str(device)
