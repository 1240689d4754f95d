"""Events of a made-up run."""

from __future__ import annotations

from collections.abc import Sequence

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events import Event
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptOutcome,
    AttemptStarted,
    TrainingStep,
)

BEGAN = 1_700_000_000.0


def started(attempt: int) -> AttemptStarted:
    return AttemptStarted(
        time=BEGAN + 1000 * attempt,
        attempt=attempt,
        world_size=2,
        batch=BatchSettings(4),
        gradient_accumulation_steps=3,
    )


def steps(attempt: int, numbers: Sequence[int], loss: float | None = None) -> list[Event]:
    return [
        TrainingStep(
            time=BEGAN + 1000 * attempt + number,
            attempt=attempt,
            step=number,
            epoch=number / 100,
            loss=loss if loss is not None else 1 / (number + 1),
            learning_rate=1e-3,
            grad_norm=0.5,
            tokens=number,
            tokens_per_second=100.0,
            gpu_memory_used=0,
            memory_used=1,
        )
        for number in numbers
    ]


def ended(attempt: int, outcome: AttemptOutcome, **said: str) -> AttemptEnded:
    return AttemptEnded(
        time=BEGAN + 1000 * attempt + 900, attempt=attempt, outcome=outcome, step=9, **said
    )
