"""The learning rate of a planned run, drawn in text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from steadytrain.components.pages.charts import text_bars
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.schedules import course_of, rate_factor, schedule_spec

_COLUMNS: Final = 60


def curve(training: TrainingConfig, steps: int, peak: float) -> Iterator[str]:
    """Yield a line with a bar for each part of the steps, and a line with the rates at its ends.

    Args:
        steps: optimizer steps of the full run, at least 1.
        peak: learning rate after warm-up.

    Raises:
        BadInput: the schedule rejects its options, or has no factor for a step.
    """
    course, kind = course_of(training, steps, peak), training.lr_scheduler_type
    columns = min(steps, _COLUMNS)
    shown = [column * (steps - 1) // max(1, columns - 1) for column in range(columns)]
    rates = [peak * rate_factor(step, kind=kind, course=course) for step in shown]
    highest = max(rates) or 1.0
    yield text_bars(rate / highest for rate in rates)
    lower = ", before validation lowers it" if schedule_spec(kind).adapts else ""
    yield (
        f"{kind}: {rates[0]:.3g} at the first step, {max(rates):.3g} at most, "
        f"{rates[-1]:.3g} at step {steps:,}{lower}"
    )
