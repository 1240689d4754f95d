"""The time of a step that has no formula, measured on this machine, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from steadytrain.components.train.framework import Learner

_STEPS: Final = 3
_LONG_SECONDS: Final = 5.0
"""A step that takes longer is not repeated."""


def seconds_of_a_step(learner: Learner) -> float:
    """Return the mean seconds of a learner's step on all its rows."""
    return mean_seconds(lambda: learner.learn((), learning_rate_scale=1.0))


def mean_seconds(step: Callable[[], object]) -> float:
    """Return the mean seconds of a step, without the first of several, which also prepares."""
    seconds = list[float]()
    while len(seconds) < _STEPS and sum(seconds) < _LONG_SECONDS:
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    later = seconds[1:] or seconds
    return sum(later) / len(later)


def cost_line(seconds: float | None, usd_per_hour: float | None) -> Iterator[str]:
    """Yield what a plan says of the cost for people, if it is known."""
    if seconds is not None and usd_per_hour is not None:
        yield f"cost     {seconds / 3600 * usd_per_hour:.3g} USD, at {usd_per_hour:.3g} an hour"
