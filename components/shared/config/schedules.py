"""What the product must know about a learning-rate schedule, whichever package provides it.

The package registers a `ScheduleSpec` under the name that `training.lr_scheduler_type` takes, in
the group `steadytrain.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from steadytrain.components.shared import plugins


@dataclass(frozen=True)
class Course:
    """What the learning rate of a step depends on, besides the step.

    steps: optimizer steps of the full training run.
    warmup: number of first steps, in which the rate rises linearly from 0.
    peak: learning rate after warm-up.
    options: what `ScheduleSpec.options` returned.
    """

    steps: int
    warmup: int
    peak: float
    options: Any = None

    @property
    def length(self) -> int:
        """Steps after warm-up; at least 1."""
        return max(1, self.steps - self.warmup)

    def progress(self, step: int) -> float:
        """Return the share of the steps after warm-up that come before `step`."""
        return (step - self.warmup) / self.length


@dataclass(frozen=True)
class ScheduleSpec:
    """A learning-rate schedule.

    factor: returns a step's learning rate as a share of the peak. It is called for steps after
        warm-up, which count from 0 over the full run.
    warms_up: whether `training.warmup_steps` applies.
    options: called with `training.lr_scheduler_kwargs` as keyword arguments, when a configuration
        is validated and when training starts; raises an exception if it does not take them. What
        it returns is `Course.options`.
    last_rate: learning rate with which it ends, if that does not depend on the peak. The peak must
        be higher.
    """

    factor: Callable[[int, Course], float]
    warms_up: bool = True
    last_rate: float = 0.0
    options: Callable[..., Any] = plugins.no_options


@cache
def schedule_spec(name: str) -> ScheduleSpec:
    """Return the spec of a schedule.

    Raises:
        BadInput: no installed package provides it, or its module cannot be imported.
    """
    return plugins.load_as(plugins.SCHEDULES, name, ScheduleSpec)
