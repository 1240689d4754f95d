"""Warm-up, then a constant rate, then a linear decay over the last fifth of the steps."""

from steadytrain.components.shared.config.schedules import Course, ScheduleSpec


def factor(step: int, course: Course) -> float:
    return max(0.0, min(1.0, (1 - course.progress(step)) / 0.2))


WARMUP_STABLE_DECAY = ScheduleSpec(factor)
