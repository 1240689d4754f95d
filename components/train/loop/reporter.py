"""Reports from rank 0 about training. The other ranks report nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from steadytrain.components.shared.events import EventStream
from steadytrain.components.shared.events.types import (
    GradientOverflow,
    TrainingStarted,
    TrainingStep,
    Validated,
)
from steadytrain.components.train.loop.emitter import Emitter
from steadytrain.components.train.loop.gpu import gpu_use
from steadytrain.components.train.loop.progress import Progress
from steadytrain.components.train.loop.setup import Parts, precision
from steadytrain.components.train.loop.steps import StepResult


@dataclass
class _Window:
    """The steps since the last report."""

    tokens: int = 0
    places: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    met: float | None = None


class Reporter(Emitter):
    """Reports training with PyTorch."""

    def __init__(self, stream: EventStream | None, attempt: int) -> None:
        super().__init__(stream, attempt)
        self.tokens = 0
        self._window = _Window()

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
                joined=parts.joined,
            )
        )

    def count(
        self, tokens: int, places: int, seconds: float, waited: float, met: float | None
    ) -> None:
        """Count a step's work. The time excludes validation and saving.

        Args:
            places: number of tokens, including padding.
            seconds: duration of the step.
            waited: how much of it was spent waiting for data.
            met: how much of it a rank spent waiting for the others; None if unknown.
        """
        self.tokens += tokens
        self._window.tokens += tokens
        self._window.places += places
        self._window.seconds += seconds
        self._window.waited += waited
        if met is not None:
            self._window.met = (self._window.met or 0.0) + met

    def step(self, parts: Parts, progress: Progress, result: StepResult) -> None:
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
                data_wait=window.waited / window.seconds,
                communication_wait=None if window.met is None else window.met / window.seconds,
                memory_used=self.resident(),
                **(gpu_use() if on_gpu else {"gpu_memory_used": 0}),
            )
        )

    def validated(
        self,
        parts: Parts,
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

    def overflow(self, parts: Parts, progress: Progress) -> None:
        self.emit(
            GradientOverflow(
                attempt=self.attempt,
                step=progress.step,
                scale=parts.strategy.scale,
            )
        )


def epoch(parts: Parts, step: int) -> float:
    """Return how many passes over the training data `step` optimizer steps make."""
    return step * parts.config.training.global_batch_size / len(parts.train)
