"""The product's own learning-rate schedules.

Those that Transformers' Trainer has, with the same names and options, are equal to it bit for bit.

Importing the Trainer's own module also imports PEFT and bitsandbytes, which adds 1.4 s to each
start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadytrain.components.shared.config.schedules import ScheduleSettings, ScheduleSpec
from steadytrain.components.shared.effects import whole_steps

_LAST_RATE: Final = 1e-7
"""Final rate of a polynomial schedule. Its power is 1."""


def _linear(step: int, settings: ScheduleSettings) -> float:
    return max(0.0, (settings.steps - step) / settings.length)


def _cosine(step: int, settings: ScheduleSettings) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * settings.progress(step))))


def _polynomial(step: int, settings: ScheduleSettings) -> float:
    left = max(0.0, 1 - settings.progress(step))
    return ((settings.peak - _LAST_RATE) * left + _LAST_RATE) / settings.peak


@dataclass(frozen=True)
class Restarts:
    """num_cycles: how many times the rate falls from its peak."""

    num_cycles: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.num_cycles, int) and self.num_cycles >= 1):
            raise ValueError(f"num_cycles is {self.num_cycles}: give a whole number of at least 1")


def _cosine_with_restarts(step: int, settings: ScheduleSettings) -> float:
    progress, options = settings.progress(step), settings.options
    if progress >= 1:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((options.num_cycles * progress) % 1.0))))


@dataclass(frozen=True)
class InverseSquareRoot:
    """timescale: steps until the rate falls; None means those of warm-up, or 10 000 without."""

    timescale: int | None = None

    def __post_init__(self) -> None:
        if self.timescale is not None and not self.timescale >= 1:
            raise ValueError(f"timescale is {self.timescale}: give a number of at least 1")


def _inverse_sqrt(step: int, settings: ScheduleSettings) -> float:
    timescale = settings.options.timescale or settings.warmup or 10_000
    return 1.0 / math.sqrt(max(1.0, (step + timescale - settings.warmup) / timescale))


_FALLS: Final[dict[str, Callable[[float], float]]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


@dataclass(frozen=True)
class StableDecay:
    """The last part of warm-up, stable, decay (Hu et al. 2024; Hagele et al. 2024).

    num_decay_steps: last steps, in which the rate falls; below 1 a share of all steps.
    decay_type: "linear", "cosine" or "1-sqrt".
    min_lr_ratio: share of the peak with which it ends.
    """

    num_decay_steps: float = 0.2
    decay_type: str = "cosine"
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.num_decay_steps < math.inf:
            raise ValueError(f"num_decay_steps is {self.num_decay_steps}: give a number above 0")
        if self.decay_type not in _FALLS:
            raise ValueError(f"decay_type is {self.decay_type!r}: use one of {', '.join(_FALLS)}")
        if not 0 <= self.min_lr_ratio < 1:
            raise ValueError(f"min_lr_ratio is {self.min_lr_ratio}: give a share below 1")


def _warmup_stable_decay(step: int, settings: ScheduleSettings) -> float:
    options: StableDecay = settings.options
    # If the steps after warm-up are fewer, the rate falls from the first of them on.
    falling = min(whole_steps(options.num_decay_steps, settings.steps), settings.length)
    begun = step - (settings.steps - falling)
    if begun < 0:
        return 1.0
    if begun >= falling:
        return options.min_lr_ratio
    factor = _FALLS[options.decay_type](begun / falling)
    return max(0.0, factor * (1.0 - options.min_lr_ratio) + options.min_lr_ratio)


@dataclass(frozen=True)
class Stairs:
    """step_size: steps between two drops; below 1 a share of all steps. gamma: factor of a drop."""

    step_size: float = 0.3
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.step_size < math.inf:
            raise ValueError(f"step_size is {self.step_size}: give a number above 0")
        if not 0 < self.gamma < 1:
            raise ValueError(f"gamma is {self.gamma}: give a number above 0 and below 1")


def _step_decay(step: int, settings: ScheduleSettings) -> float:
    options: Stairs = settings.options
    every = whole_steps(options.step_size, settings.steps)
    return math.pow(options.gamma, (step - settings.warmup) // every)


def _constant(*_: object) -> float:
    return 1.0


def _range_test(step: int, settings: ScheduleSettings) -> float:
    lowest: float = settings.options
    return math.pow(lowest / settings.peak, 1 - step / max(1, settings.steps - 1))


def _range_options(*, lowest: float) -> float:
    if not lowest > 0:
        raise ValueError(f"lowest is {lowest}: give a rate above 0")
    return lowest


@dataclass(frozen=True)
class PlateauOptions:
    """Options of PyTorch's ReduceLROnPlateau, which counts validations.

    factor: factor on the rate when the score stops improving.
    patience: validations without a better score before that.
    threshold: share of the best score by which a better one must differ.
    cooldown: validations after a reduction that do not count.
    min_lr: lowest rate, for parameters with a factor of 1.
    """

    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    cooldown: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"factor is {self.factor}: give a number above 0 and below 1")
        for name in ("patience", "cooldown"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{name} is {value}: give a whole number of at least 0")
        for name in ("threshold", "min_lr"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}: give a number of at least 0 and below 1")


class Plateau:
    """The factor of PyTorch's ReduceLROnPlateau on the rate."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self._options: PlateauOptions = settings.options
        self._lowest = self._options.min_lr / settings.peak
        self.scale = 1.0
        self._best: float | None = None
        self._worse = self._cooling = 0

    def note(self, score: float, *, greater_is_better: bool) -> None:
        if self._is_better(score, greater_is_better):
            self._best, self._worse = score, 0
        else:
            self._worse += 1
        if self._cooling > 0:
            self._cooling -= 1
            self._worse = 0
        if self._worse > self._options.patience:
            self.scale = min(self.scale, max(self.scale * self._options.factor, self._lowest))
            self._cooling, self._worse = self._options.cooldown, 0

    def _is_better(self, score: float, greater_is_better: bool) -> bool:
        if self._best is None:
            return math.isfinite(score)
        if greater_is_better:
            return score > self._best * (1 + self._options.threshold)
        return score < self._best * (1 - self._options.threshold)

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "scale": self.scale,
            "best": self._best,
            "worse": self._worse,
            "cooling": self._cooling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self._best = state["scale"], state["best"]
        self._worse, self._cooling = state["worse"], state["cooling"]


LINEAR: Final = ScheduleSpec(_linear)
COSINE: Final = ScheduleSpec(_cosine)
COSINE_WITH_RESTARTS: Final = ScheduleSpec(_cosine_with_restarts, options=Restarts)
INVERSE_SQRT: Final = ScheduleSpec(_inverse_sqrt, options=InverseSquareRoot)
STEP_DECAY: Final = ScheduleSpec(_step_decay, options=Stairs)
WARMUP_STABLE_DECAY: Final = ScheduleSpec(_warmup_stable_decay, options=StableDecay)
POLYNOMIAL: Final = ScheduleSpec(_polynomial, last_rate=_LAST_RATE)
CONSTANT: Final = ScheduleSpec(_constant, warms_up=False, changes=False)
CONSTANT_WITH_WARMUP: Final = ScheduleSpec(_constant, changes=False)
REDUCE_LR_ON_PLATEAU: Final = ScheduleSpec(
    _constant,
    options=PlateauOptions,
    adapts=Plateau,
    # The first score is the best, and one more than its patience must be worse.
    acts_after=lambda options: int(options.patience) + 2,
)
RANGE_TEST: Final = ScheduleSpec(_range_test, warms_up=False, options=_range_options)
"""The rate grows exponentially from `lowest` to the peak (Smith 2017)."""
