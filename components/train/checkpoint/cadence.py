"""How often to save a checkpoint, and which ones to keep.

Each checkpoint costs time, and so does each step that is lost without one. The interval sqrt(2 *
cost * mean time between failures) minimizes the sum of both: J. W. Young, "A first order
approximation to the optimum checkpoint interval", CACM 17 (1974); refined by J. T. Daly, FGCS 22
(2006).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.checkpoints import is_worth

FIRST_SECONDS: Final = 60.0
"""Interval before the first checkpoint, whose cost is not known yet."""


def expected_between_failures(prior_seconds: float, run_seconds: float, failures: int) -> float:
    """Return the mean seconds between failures. The prior counts as one failure in that time.

    Args:
        run_seconds: total duration of the attempts so far.
        failures: number of attempts that a failure ended.
    """
    return (prior_seconds + run_seconds) / (1 + failures)


class Cadence:
    """Decides when the next checkpoint is due, based on what the previous ones cost.

    Args:
        cost: (blocking, writing) seconds of an earlier attempt's last checkpoint.
        examples: of the training side; with few, an epoch ends with a checkpoint, if it is worth
            that.
    """

    def __init__(
        self,
        between_failures_seconds: float,
        cost: tuple[float, float] | None = None,
        examples: float = math.inf,
    ) -> None:
        self.between_failures, self.examples = between_failures_seconds, examples
        self.interval, self._blocking = FIRST_SECONDS, 0.0
        if cost is not None:
            self.measured(*cost)
        self.began()

    def began(self) -> None:
        """Restart the interval. Call it when training or the save of a checkpoint starts."""
        self._last = time.monotonic()

    def measured(self, blocking_seconds: float, writing_seconds: float) -> None:
        """Update the interval from a checkpoint's cost. It is never shorter than a write."""
        best = math.sqrt(2 * blocking_seconds * self.between_failures)
        self.interval, self._blocking = max(best, writing_seconds), blocking_seconds

    def is_due(self, *, epoch_ends: bool = False) -> bool:
        """Return whether the interval is over, or an epoch's end is worth a checkpoint."""
        seconds = time.monotonic() - self._last
        worth = epoch_ends and is_worth(self.examples, seconds, self._blocking)
        return worth or seconds >= self.interval


@dataclass(frozen=True)
class Moment:
    """The end of a step, and what has come with it.

    better: whether it was validated, and the best so far.
    unscored: whether no validation has had a score yet.
    due: whether a `Cadence` said so before the step.
    """

    step: int
    last: bool
    better: bool
    unscored: bool
    due: bool


def ends_epoch(step: int, rows: int, batch: int) -> bool:
    """Return whether an epoch of some rows ends within a step of `batch` rows."""
    return step * batch // rows > (step - 1) * batch // rows


def is_saved(moment: Moment, training: TrainingConfig, *, rows: int, batch: int) -> bool:
    """Return whether a step ends with a checkpoint, by `training.save_strategy`.

    Args:
        rows: of an epoch.
        batch: rows of a step.
    """
    if training.saves == "best":
        # Without any score, the last model is exported.
        return moment.better or (moment.last and moment.unscored)
    if moment.last or moment.due or (moment.better and training.load_best_model_at_end):
        return True
    if training.saves == "epoch":
        return ends_epoch(moment.step, rows, batch)
    return training.save_steps is not None and moment.step % training.save_steps == 0


def check_scores(training: TrainingConfig, validation_rows: int) -> None:
    """Raise BadInput if checkpoints follow a score, and there is nothing to validate."""
    if training.saves == "best" and not validation_rows:
        raise BadInput(
            "training.save_strategy = 'best': there are no validation data, so nothing is the best",
            remedy="raise data.validation_share, or use another strategy",
        )


@dataclass(frozen=True)
class Retention:
    """Keeps the newest `newest` checkpoints, the best one, and those at multiples of `every`."""

    newest: int
    every: int | None = None

    def superfluous(self, steps: Sequence[int], *, best: int) -> list[int]:
        """Return those of `steps` that can be removed.

        Args:
            best: step of the best model so far; 0 if there is none.
        """
        recent = set(sorted(steps)[-self.newest :])
        return [
            step
            for step in sorted(steps)
            if step not in recent and step != best and not (self.every and step % self.every == 0)
        ]
