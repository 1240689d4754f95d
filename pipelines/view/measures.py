"""What the plan's formula predicted for a run, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Final

from steadytrain.components.report.facts import Facts
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import AttemptStarted, TrainingStep
from steadytrain.components.shared.quantities import amount, size
from steadytrain.components.sizing.batch import BatchPlan
from steadytrain.components.sizing.start import Estimate, estimate

_NEWEST_STEPS: Final = 50
"""How many of the newest training reports the measured speed is the median of."""


@dataclass(frozen=True)
class Comparison:
    """One prediction beside its measurement, in words."""

    name: str
    predicted: str
    measured: str
    difference: str


def predicted_and_measured(facts: Facts) -> list[Comparison]:
    """Return memory and speed of the newest attempt; "" stands for what is unknown."""
    attempts = facts.of(AttemptStarted)
    if not attempts:
        return []
    number = attempts[-1].attempt
    steps = [event for event in facts.of(TrainingStep) if event.attempt == number]
    # A page must not import the module that a run's configuration names.
    named = ":" in str(facts.setting("data.task"))
    expected = None if named else _expected(facts.config_text, attempts[-1])
    return list(_compared(expected, steps))


def _compared(expected: Estimate | None, steps: list[TrainingStep]) -> Iterator[Comparison]:
    peak = max((event.gpu_memory_peak for event in steps), default=0)
    yield Comparison(
        "GPU memory of a rank",
        size(expected.memory) if expected else "",
        size(peak) if peak else "",
        f"{peak / expected.memory - 1:+.0%}" if expected and peak else "",
    )
    speeds = [event.tokens_per_second for event in steps[-_NEWEST_STEPS:]]
    speeds = [speed for speed in speeds if math.isfinite(speed)]
    measured = median(speeds) if speeds else 0.0
    span = expected.tokens_per_second if expected else None
    yield Comparison(
        "Tokens per second",
        f"{amount(span.low)} to {amount(span.high)}" if span else "",
        amount(measured) if measured else "",
        f"{measured / span.middle - 1:+.0%}" if span and measured else "",
    )


# A page is drawn again with every step, but the prediction changes with the attempt.
@lru_cache(maxsize=64)
def _predicted(text: str, device: str, nodes: int, plan: BatchPlan) -> Estimate | None:
    try:
        return estimate(load(text + "\n"), device, nodes, 0, plan)
    except BadInput:
        return None


def _expected(text: str, started: AttemptStarted) -> Estimate | None:
    batch = BatchPlan(started.batch, started.gradient_accumulation_steps, started.world_size)
    return _predicted(text, started.device, started.nodes, batch) if text else None
