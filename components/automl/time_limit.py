"""How a search keeps its limit on wall time: which units begin, and which have taken too long.

Nothing here changes what a unit learns. Without `automl.budget.hours`, no unit is left out, and the
same seed gives the same board.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.launch.launcher import jobs_for
from steadytrain.components.tune.history import History, Trial

UNIT_SECONDS: Final = 1.5
"""What a unit takes beside learning, as measured on one core."""
_FINISH: Final = 14.0
"""How many times as long the winner's run takes, beside learning and preparing the data."""
_OVERRUN: Final = 10.0
"""How many times as long as predicted a unit may take."""
_LEAST_SECONDS: Final = 600.0
"""How long each unit may take, whatever is predicted."""


class TimeLimit:
    """Predicts units from those that have finished, and divides the wall time that is left.

    Args:
        costs: returns the families' rough costs (`Family.seconds`) by configuration, with the names
            of the families.
        members: returns the places of the configurations that would be trained again now.
    """

    def __init__(
        self,
        config: RunConfig,
        history: History,
        costs: Callable[[], Sequence[tuple[str, float]]],
        members: Callable[[], Sequence[int]],
    ) -> None:
        budget = config.automl.budget
        self.seconds = math.inf if budget.hours is None else budget.hours * 3600
        self._unit_seconds = budget.unit_minutes and budget.unit_minutes * 60
        self._folds, self._parallel = config.cross_validation.splits, config.tune.budget.parallel
        # The winner learns from all folds of a division, a unit from all but one.
        self._more = config.cross_validation.folds / (config.cross_validation.folds - 1)
        self._here = jobs_for(config.compute) is None
        self._history, self._costs, self._members = history, costs, members
        self._chosen: tuple[int, Sequence[int]] = (0, ())

    def skipped(self, number: int, elapsed: float) -> str:
        """Return why a unit is not to begin; "" if it is."""
        place, fold = divmod(number, self._folds)
        for trial in self._history.trials[number - fold : number]:
            if trial.status == "failed":
                return f"fold {trial.number % self._folds} failed"
            if trial.status == "skipped":
                return trial.reason
        if not math.isfinite(self.seconds) or not (walls := self._walls()):
            return ""
        unit = self._unit(place, walls)
        busy = sum(
            max(0.0, self._unit(it.number // self._folds, walls) - elapsed + it.began)
            for it in self._history.running.values()
        )
        needed = math.ceil((self._folds - fold) / self._parallel) * unit + busy / self._parallel
        left = self.seconds - elapsed - self._reserve(walls, place)
        if needed <= left:
            return ""
        return (
            f"not started: time (its folds take about {duration(needed)}, and the limit of "
            f"{duration(self.seconds)} leaves {duration(max(0.0, left))} for them)"
        )

    def out_of_time(self, elapsed: float) -> bool:
        """Return whether only the time for the winner is left."""
        if not math.isfinite(self.seconds):
            return False
        return elapsed >= self.seconds - self._reserve(self._walls())

    def overdue(self, trial: Trial, elapsed: float, since_prepared: float | None) -> str:
        """Return why a running unit is to be killed; "" if it is not.

        `automl.budget.unit_minutes` counts from when the unit has its data and a process. Before
        that, it waits for the data, as long as a preparation that does not hang takes.

        Args:
            since_prepared: see `TrialState`.
        """
        walls, taken = self._walls(), elapsed - trial.began
        limit, why = self._unit_seconds, "automl.budget.unit_minutes"
        if limit is None:
            if not walls or not self._here:
                # Data are prepared first, and pods wait for a node.
                return ""
            expected = self._unit(trial.number // self._folds, walls)
            limit, why = max(_LEAST_SECONDS, _OVERRUN * expected), f"{_OVERRUN:g} times as long"
            why += f" as predicted, and at least {duration(_LEAST_SECONDS)}"
        elif since_prepared is None:
            limit = max(_LEAST_SECONDS, _OVERRUN * limit)
            why = f"{_OVERRUN:g} times {why} to prepare its data, and at least "
            why += duration(_LEAST_SECONDS)
        else:
            taken = min(taken, since_prepared)
        if taken <= limit:
            return ""
        return f"killed after {duration(taken)}: it may take {duration(limit)} ({why})"

    def _walls(self) -> dict[int, list[float]]:
        """Return the wall times of finished units by configuration.

        The first ones, which wait for the data, say nothing about the others.
        """
        found = defaultdict[int, list[float]](list)
        ended = [it for it in self._history.trials if it.status == "finished"]
        prepared = min((it.began + it.wall for it in ended), default=math.inf)
        for trial in ended:
            if trial.began >= prepared:
                found[trial.number // self._folds].append(trial.wall)
        return found

    def _unit(self, place: int, walls: dict[int, list[float]]) -> float:
        """Predict the wall time of a configuration's next unit."""
        if place in walls:
            return max(walls[place])
        costs, beside = self._costs(), self._beside(walls)
        # One that is suggested after the portfolio has no unit yet.
        family, cost = costs[place] if place < len(costs) else ("", max(it for _, it in costs))
        if same := [statistics.fmean(it) for n, it in walls.items() if costs[n][0] == family]:
            return max(same)
        rough = sum(costs[n][1] for n in walls)
        learning = sum(max(0.0, statistics.fmean(it) - beside) for it in walls.values())
        return beside + (cost * learning / rough if rough else 0.0)

    @staticmethod
    def _beside(walls: dict[int, list[float]]) -> float:
        """Return what a unit takes beside learning: as long as the fastest configuration."""
        return min((statistics.median(it) for it in walls.values()), default=UNIT_SECONDS)

    def _reserve(self, walls: dict[int, list[float]], more: int | None = None) -> float:
        """Return what training, judging and registering the winner takes.

        Args:
            more: a configuration that may become one of its members.
        """
        ended = Counter(
            trial.number // self._folds
            for trial in self._history.trials
            if trial.status == "finished"
        )
        complete = sum(count == self._folds for count in ended.values())
        if complete != self._chosen[0]:
            self._chosen = complete, self._members()
        beside = self._beside(walls)
        members = {*self._chosen[1], *([] if more is None else [more])}
        learning = sum(max(0.0, self._unit(place, walls) - beside) for place in members)
        first = self._history.trials[0].wall if walls else 0.0
        prepared = max(0.0, first - beside)
        return learning * self._more + _FINISH * beside + prepared
