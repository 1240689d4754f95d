"""What the product must know about a learning-rate schedule, whichever package provides it.

The package registers a `ScheduleSpec` under the name that `training.lr_scheduler_type` takes, in
the group `steadytrain.schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.training import TrainingConfig
from steadytrain.components.shared.effects import whole_steps
from steadytrain.components.shared.errors import BadInput


@dataclass(frozen=True)
class ScheduleSettings:
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


class Adaptive(Protocol):
    """A factor on the learning rate that follows the validation scores."""

    @property
    def scale(self) -> float:
        """The factor from now on."""

    def note(self, score: float, *, greater_is_better: bool) -> None:
        """Take the score of a validation, which is equal on all ranks."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as plain JSON data, for checkpoints."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class ScheduleSpec:
    """A learning-rate schedule.

    factor: returns a step's learning rate as a share of the peak. It is called for steps after
        warm-up, which count from 0 over the full run.
    warms_up: whether `training.warmup_steps` applies.
    options: called with `training.lr_scheduler_kwargs` as keyword arguments, when a configuration
        is validated and when training starts; raises an exception if it does not take them. What
        it returns is `ScheduleSettings.options`.
    last_rate: learning rate with which it ends, if that does not depend on the peak. The peak must
        be higher.
    changes: whether the rate changes after warm-up.
    adapts: creates what multiplies `factor` by a value that follows from validations; None if the
        rate depends on the step alone.
    acts_after: returns, for what `options` returned, how many validations `adapts` needs to change
        the rate.
    """

    factor: Callable[[int, ScheduleSettings], float]
    warms_up: bool = True
    last_rate: float = 0.0
    options: Callable[..., Any] = plugins.no_options
    changes: bool = True
    adapts: Callable[[ScheduleSettings], Adaptive] | None = None
    acts_after: Callable[[Any], int] | None = None


@cache
def schedule_spec(name: str) -> ScheduleSpec:
    """Return the spec of a schedule.

    Raises:
        BadInput: no installed package provides it, or its module cannot be imported.
    """
    return plugins.load_as(plugins.SCHEDULES, name, ScheduleSpec)


def schedule_settings(training: TrainingConfig, steps: int, peak: float) -> ScheduleSettings:
    """Return the settings over `steps` optimizer steps. A warm-up below 1 is a fraction of them.

    The last step is never one of warm-up: the only step of a run would have a rate of 0.

    Raises:
        BadInput: the schedule rejects its options.
    """
    kind, spec = training.lr_scheduler_type, schedule_spec(training.lr_scheduler_type)
    options = plugins.call(spec.options, training.lr_scheduler_kwargs, kind)
    warmup = whole_steps(training.warmup_steps, steps) if spec.warms_up else 0
    return ScheduleSettings(steps, min(warmup, steps - 1), peak, options)


def validations_to_act(training: TrainingConfig) -> int:
    """Return how many validations an adaptive schedule needs to change the rate; 0 if none."""
    spec = schedule_spec(training.lr_scheduler_type)
    if spec.acts_after is None:
        return 0
    kind = training.lr_scheduler_type
    return spec.acts_after(plugins.call(spec.options, training.lr_scheduler_kwargs, kind))


def rate_factor(step: int, *, kind: str, settings: ScheduleSettings) -> float:
    """Return the factor for the peak rate.

    Raises:
        BadInput: the schedule's factor is negative or not finite.
    """
    if step < settings.warmup:
        return step / settings.warmup
    factor = schedule_spec(kind).factor(step, settings)
    if not (math.isfinite(factor) and factor >= 0):
        raise BadInput(
            f"training.lr_scheduler_type = {kind!r}: its factor at step {step} is {factor}",
            remedy="fix the schedule: its factor must be finite and not negative",
        )
    return factor
