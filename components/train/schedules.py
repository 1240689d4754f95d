"""The product's own learning-rate schedules, bit for bit equal to those of Transformers' Trainer.

Importing the Trainer's own module also imports PEFT and bitsandbytes, which adds 1.4 s to each
start.
"""

from __future__ import annotations

import math
from typing import Final

from steadytrain.components.shared.config.schedules import Course, ScheduleSpec

_LAST_RATE: Final = 1e-7
"""Final rate of a polynomial schedule. Its power is 1."""


def _linear(step: int, course: Course) -> float:
    return max(0.0, (course.steps - step) / course.length)


def _cosine(step: int, course: Course) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * course.progress(step))))


def _polynomial(step: int, course: Course) -> float:
    left = max(0.0, 1 - course.progress(step))
    return ((course.peak - _LAST_RATE) * left + _LAST_RATE) / course.peak


def _constant(*_: object) -> float:
    return 1.0


def _range_test(step: int, course: Course) -> float:
    lowest: float = course.options
    return math.pow(lowest / course.peak, 1 - step / max(1, course.steps - 1))


def _range_options(*, lowest: float) -> float:
    if not lowest > 0:
        raise ValueError(f"lowest is {lowest}: give a rate above 0")
    return lowest


LINEAR: Final = ScheduleSpec(_linear)
COSINE: Final = ScheduleSpec(_cosine)
POLYNOMIAL: Final = ScheduleSpec(_polynomial, last_rate=_LAST_RATE)
CONSTANT: Final = ScheduleSpec(_constant, warms_up=False)
CONSTANT_WITH_WARMUP: Final = ScheduleSpec(_constant)
RANGE_TEST: Final = ScheduleSpec(_range_test, warms_up=False, options=_range_options)
"""The rate grows exponentially from `lowest` to the peak (Smith 2017)."""
