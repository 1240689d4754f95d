"""Warm-up, then a constant rate, then a linear decay over the last steps."""

from dataclasses import dataclass

from steadytrain.components.shared.config.schedules import ScheduleSettings, ScheduleSpec


@dataclass(frozen=True)
class Options:
    """decay: share of the steps after warm-up in which the rate falls."""

    decay: float = 0.2

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay = {self.decay}: give a share above 0, up to 1")


def factor(step: int, settings: ScheduleSettings) -> float:
    return max(0.0, min(1.0, (1 - settings.progress(step)) / settings.options.decay))


TRAPEZOID = ScheduleSpec(factor, options=Options)
