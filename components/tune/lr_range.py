"""The learning-rate range test: one run with a growing rate, and the range that suits it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from markupsafe import Markup
from pydantic import BaseModel

from steadytrain.components.pages.charts import WIDE, Series, scatter
from steadytrain.components.pages.html import html
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.events import Cursor
from steadytrain.components.shared.events.types import AttemptEnded, TrainingStep
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.quantities import number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.train.failures import FailureClass
from steadytrain.components.tune.study import studies_folder
from steadytrain.components.tune.trials.base import Trials
from steadytrain.components.tune.trials.folder import TrialFolder

_SMOOTHING: Final = 0.8
"""Weight of the earlier losses. It delays the curve by about 4 steps, a fifth of a decade."""
_EXPLODED: Final = 4.0
"""As in fastai: the test ends when the smoothed loss is this many times its minimum."""
_FALLS: Final = 0.1
"""Share of the whole improvement after which the loss counts as falling."""
_LEAST: Final = 0.01
"""Improvement as a share of the first loss below which nothing was learned."""


class Point(BaseModel):
    """A step of the test."""

    rate: float
    loss: float
    smoothed: float


class RangeResult(BaseModel):
    """What a range test found.

    low: rate from which the smoothed loss falls; None if it never did.
    high: rate of its minimum.
    steepest: rate at which it falls fastest per decade.
    exploded: rate at which the test ended early; None if it reached its highest rate.
    """

    low: float | None
    high: float | None
    steepest: float | None
    exploded: float | None
    points: list[Point]


def curve_of(losses: Sequence[tuple[float, float]]) -> list[Point]:
    """Return the points of (rate, loss) pairs, smoothed exponentially without bias at the start."""
    points, mean = list[Point](), 0.0
    for count, (rate, loss) in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        points.append(Point(rate=rate, loss=loss, smoothed=mean / (1 - _SMOOTHING**count)))
    return points


def exploded(points: Sequence[Point]) -> bool:
    """Return whether the loss has left its minimum for good."""
    if not points:
        return False
    last = points[-1].smoothed
    return not math.isfinite(last) or last > _EXPLODED * min(item.smoothed for item in points)


def suggested(points: Sequence[Point], *, ended_early: bool) -> RangeResult:
    """Return the range between the rates at which the loss begins and ceases to fall.

    Args:
        ended_early: whether the loss exploded, or was not finite, at the next rate.
    """
    stop = points[-1].rate if points and ended_early else None
    none = RangeResult(low=None, high=None, steepest=None, exploded=stop, points=list(points))
    if not points:
        return none
    best = min(range(len(points)), key=lambda index: points[index].smoothed)
    top, bottom = max(item.smoothed for item in points[: best + 1]), points[best].smoothed
    if top - bottom < _LEAST * abs(top):
        return none
    limit = top - _FALLS * (top - bottom)
    # The last point above the limit: before it, the loss only wobbled.
    start = max(index for index in range(best + 1) if points[index].smoothed >= limit)
    steepest = min(range(start, best), key=lambda index: _slope(points, index))
    return none.model_copy(
        update={
            "low": points[start].rate,
            "high": points[best].rate,
            "steepest": points[steepest].rate,
        }
    )


def _slope(points: Sequence[Point], index: int) -> float:
    """Return the change of the smoothed loss per decade from a point to the next."""
    here, following = points[index], points[index + 1]
    return (following.smoothed - here.smoothed) / math.log10(following.rate / here.rate)


RESULT: Final = "lr-range.json"
_LOWEST, _HIGHEST = 1e-6, 1.0
_STEPS: Final = 120
"""20 in each of the six decades."""
_POLL_SECONDS: Final = 0.05
_TRIAL: Final = 0


def range_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a range test: the run's own, but for the rate and the length.

    Raises:
        BadInput: `training.lr_scaling` would multiply the rates that the test finds.
    """
    if config.training.rate_scale != 1:
        raise BadInput(
            f"training.lr_scaling = {config.training.lr_scaling!r}: a range test finds the "
            "rate for training.global_batch_size itself",
            remedy="leave it out, with --set training.lr_scaling=none",
        )
    training = config.training.model_copy(
        update={
            "learning_rate": _HIGHEST,
            "lr_scheduler_type": "range_test",
            "lr_scheduler_kwargs": {"lowest": _LOWEST},
            "warmup_steps": 0,
            "max_steps": _STEPS,
            "eval_steps": _STEPS,
            "save_strategy": None,
            "save_steps": _STEPS,
            "logging_steps": 1,
            "early_stopping_patience": None,
            "load_best_model_at_end": False,
        }
    )
    # The test ends when the loss explodes.
    recovery = config.recovery.model_copy(update={"spike_threshold": 0.0})
    return config.model_copy(update={"training": training, "recovery": recovery})


def range_folder(config: RunConfig) -> Path:
    """Return the folder of a configuration's range test. Other settings have another folder."""
    name, digest = config.run or config.name, range_config(config).digest()
    return studies_folder(config) / f"{name}-{digest[:8]}-lr-range"


def range_test(
    config: RunConfig, open_trials: Callable[[Path], Trials], check: Callable[[], None]
) -> RangeResult:
    """Run the test, or return what an earlier one found. Its checkpoints and its model are removed.

    Args:
        open_trials: opens the trials of a study's folder.
        check: called often; raises when this process was asked to stop.

    Raises:
        RunBusy: another process runs this test.
        BadInput: training rejected the configuration or the data.
        SteadytrainError: training failed for another reason than a diverging loss.
    """
    folder = range_folder(config)
    storage = LocalStorage(folder)
    seconds = config.recovery.lease_seconds
    with hold(storage.sub("lease"), run_id=folder.name, seconds=seconds, what="study"):
        if known := _known(storage):
            return known
        trials = open_trials(folder)
        trials.attach()
        try:
            result = _trained(range_config(config), folder, trials, check)
            storage.write(RESULT, f"{result.model_dump_json(indent=2)}\n".encode())
            trials.discard(_TRIAL)
        finally:
            trials.close()
    return result


def _known(storage: LocalStorage) -> RangeResult | None:
    """Return what an earlier test found; None if there was none, or if its file is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return RangeResult.model_validate_json(storage.read(RESULT))
    return None


def _trained(
    config: RunConfig, folder: Path, trials: Trials, check: Callable[[], None]
) -> RangeResult:
    losses = Losses(TrialFolder(folder, _TRIAL).workspace.events)
    trials.train(_TRIAL, config, config.training.max_steps)
    while True:
        check()
        # The state first: what it reports as ended has no further events.
        state = trials.state(_TRIAL)
        points = curve_of(losses.now())
        if losses.diverged or exploded(points):
            trials.stop(_TRIAL)
            return suggested(points, ended_early=True)
        if state.condition == "finished":
            return suggested(points, ended_early=False)
        if state.condition == "failed":
            kind = BadInput if state.failure == FailureClass.USER_BUG else SteadytrainError
            raise kind(state.error, remedy=f"the log is {TrialFolder(folder, _TRIAL).log}")
        time.sleep(_POLL_SECONDS)


class Losses:
    """The losses that a run reports.

    diverged: whether training diverged; later attempts with other rates do not count.
    """

    def __init__(self, events: Path) -> None:
        self._events = Cursor(events)
        self._losses = dict[int, tuple[float, float]]()
        self.diverged = False

    def now(self) -> list[tuple[float, float]]:
        """Return the rate and the loss of each step so far."""
        for event in self._events.new():
            if self.diverged:
                break
            if isinstance(event, TrainingStep):
                self._losses[event.step] = event.learning_rate, event.loss
            elif isinstance(event, AttemptEnded):
                self.diverged = event.failure_class == FailureClass.DIVERGENCE
        return [self._losses[step] for step in sorted(self._losses)]


def render(result: RangeResult, name: str) -> str:
    """Return the report of a range test as HTML."""
    return html(
        "lr_range",
        kind="range test",
        name=name,
        found=result,
        sentence=sentence(result),
        chart=_chart(result),
        setting=setting(result),
    )


def sentence(result: RangeResult) -> str:
    """Return the result in one or two sentences."""
    if result.low is None:
        return "The loss did not fall at any learning rate, so there is no range to suggest."
    ending = (
        f"At {number(result.exploded)} it explodes."
        if result.exploded is not None
        else "It never explodes."
    )
    return (
        f"The loss falls at learning rates from {number(result.low)} to {number(result.high)}, "
        f"fastest at {number(result.steepest)}. {ending}"
    )


def setting(result: RangeResult) -> str:
    """Return the option that makes a study search the range; "" without one."""
    if result.low is None:
        return ""
    return (
        f"--set 'tune.space={{training.learning_rate: {{low: {result.low:.2g}, "
        f"high: {result.high:.2g}, log: true}}}}'"
    )


def _chart(result: RangeResult) -> Markup:
    # A loss that explodes would flatten the other points into one line.
    first = result.points[0].smoothed if result.points else 0.0
    shown = [item for item in result.points if item.loss < 2 * first]
    dots = [((item.rate, item.loss), f"{number(item.rate)}: {number(item.loss)}") for item in shown]
    smoothed = [(item.rate, item.smoothed) for item in shown]
    ends = [end for end in (result.low, result.high) if end is not None]
    steps = [Series("trial stopped", dots=dots)]
    return scatter(
        "Loss", steps, "learning rate", log=True, through=smoothed, marks=ends, width=WIDE
    )
