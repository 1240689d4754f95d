"""How a search keeps its limit on wall time: which units begin, and which have taken too long.

Nothing here changes what a unit learns. Without `automl.budget.hours`, no unit is left out, and the
same seed gives the same board. The first configuration, which costs next to nothing unless it is a
network, is always trained on all folds, so that there is a model unless the limit is too short for
any.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import NETWORKS, SERIES
from steadytrain.components.shared.quantities import duration
from steadytrain.components.train.launch.launcher import jobs_for
from steadytrain.components.tune.history import History, Trial

UNIT_SECONDS: Final = 1.5
"""What a unit takes besides learning, as measured on one core."""
_FINISH: Final = 13.0
"""How many times as long the winner's run takes, besides learning and preparing the data."""
_AGAIN: Final = 4.5
"""How many times as long that takes as a command until its first unit. Both are mostly imports, so
this tells how fast the machine is before a unit has ended."""
_START: Final = _AGAIN / _FINISH
"""How many times as long as the command until its first unit a unit takes besides learning."""
_OVERRUN: Final = 10.0
"""How many times as long as predicted a unit may take."""
_LEAST_SECONDS: Final = 600.0
"""How long each unit may take, whatever is predicted."""
_PREPARING: Final = 6 * 3600.0
"""How long the first preparation may take in any case: nothing predicts it where data that are
large or elsewhere have not been read before."""


def time_line(config: RunConfig, elapsed: float) -> str:
    """Return how a search kept its limit on wall time, as a line; "" without a limit.

    Args:
        elapsed: seconds of the whole search, from its start to the registered model.
    """
    if (hours := config.automl.budget.hours) is None:
        return ""
    over = 100 * (elapsed / (hours * 3600) - 1)
    far = f"{abs(over):.0f} % {'above' if over > 0 else 'below'}"
    return f"time: {duration(elapsed)}, {far} automl.budget.hours = {hours:g}"


class TimeLimit:
    """Predicts units from those that have finished, and divides the wall time that is left.

    Args:
        costs: returns the families' rough costs (`Family.seconds`) by configuration, with the names
            of the families.
        members: returns the indices of the configurations that would be trained again now.
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
        # The winner learns from all folds of a division, a unit from all but one. That of series
        # learns once more from what came last, after its intervals have been measured.
        folds = config.cross_validation.folds
        self._more = folds / (folds - 1)
        if config.data.task in SERIES:
            self._more *= 2
        elif config.data.in_time:
            # A unit learns from half of the records, and from one more of the later parts for each
            # fold before its own.
            self._more = 1 / (0.5 + (folds - 1) / (4 * (folds + 1)))
        self._here = jobs_for(config.compute) is None
        self._networks = config.data.task in NETWORKS
        self._history, self._costs, self._members = history, costs, members
        self._chosen: tuple[int, Sequence[int]] = (0, ())
        self._board = 0.0

    def skipped(self, number: int, kind: tuple[str, float], elapsed: float) -> str:
        """Return why a unit is not to begin; "" if it is.

        Args:
            kind: the name of its family, and the family's rough cost.
        """
        index, fold = divmod(number, self._folds)
        for trial in self._history.trials[number - fold : number]:
            if trial.status == "failed":
                return f"fold {trial.number % self._folds} failed"
            if trial.status == "skipped":
                return trial.reason
        if not index or not math.isfinite(self.seconds) or not (walls := self._walls()):
            return ""
        unit = self._unit(index, walls, kind)
        busy = self._busy(walls, elapsed)
        needed = math.ceil((self._folds - fold) / self._parallel) * unit + busy / self._parallel
        left = self.seconds - elapsed - self._reserve(walls, elapsed, {index: unit})
        if needed <= left:
            return ""
        return (
            f"not started: time (its folds take about {duration(needed)}, and the limit of "
            f"{duration(self.seconds)} leaves {duration(max(0.0, left))} for them)"
        )

    def expected(self, units: int, elapsed: float) -> tuple[int, float] | None:
        """Return how many units are still to begin, and the wall time until the last one ends.

        Args:
            units: of the whole search.

        Returns:
            None until a unit shows how long one takes.
        """
        begun = len(self._history.trials)
        if not (walls := self._walls()):
            return None
        places = Counter(number // self._folds for number in range(begun, units))
        waiting = sum(count * self._unit(index, walls) for index, count in places.items())
        seconds = (waiting + self._busy(walls, elapsed)) / self._parallel
        return max(0, units - begun), min(seconds, max(0.0, self.seconds - elapsed))

    def out_of_time(self, elapsed: float) -> bool:
        """Return whether only the time for the winner is left."""
        if not math.isfinite(self.seconds):
            return False
        first = self._history.trials[: self._folds]
        if not first:
            return self.least(elapsed) > self.seconds
        if len(first) < self._folds or any(it.status == "running" for it in first):
            # Predictions from its first units, which wait for the data, are the least certain.
            winner = _AGAIN * self._began(elapsed) + self._more * self._longest(elapsed)
            return elapsed >= self.seconds - winner
        return elapsed >= self.seconds - self._reserve(self._walls(), elapsed)

    def least(self, elapsed: float) -> float:
        """Return the shortest limit in seconds with which the search could still have a model.

        That leaves time for the missing folds of the first configuration and for its run, both by
        how long the command took to begin.
        """
        began = self._began(elapsed)
        done = sum(it.status == "finished" for it in self._history.trials[: self._folds])
        folds = math.ceil((self._folds - done) / self._parallel)
        longest = self._longest(elapsed)
        units = folds * max(_START * began, longest)
        return elapsed + units + _AGAIN * began + self._more * longest

    def overdue(self, trial: Trial, elapsed: float, since_prepared: float | None) -> str:
        """Return why a running unit is to be killed; "" if it is not.

        `automl.budget.unit_minutes` counts from when the unit has its data and a process. Before
        that, it waits for the data, as long as a preparation that does not hang takes. Without that
        limit and one of the search, that depends on how long the command took to begin, since it
        reads data that are small and here.

        Args:
            since_prepared: see `TrialState`.
        """
        walls, taken = self._walls(), elapsed - trial.began
        limit, why = self._unit_seconds, "automl.budget.unit_minutes"
        if limit is None:
            if walls and self._here:
                expected = self._unit(trial.number // self._folds, walls)
                limit, why = max(_LEAST_SECONDS, _OVERRUN * expected), f"{_OVERRUN:g} times as long"
                why += f" as predicted, and at least {duration(_LEAST_SECONDS)}"
            elif since_prepared is None and not math.isfinite(self.seconds):
                # Data are prepared next to the driver, before a pod waits for a node.
                limit = max(_PREPARING, _OVERRUN * self._history.trials[0].began)
                why = "to prepare the data; automl.budget.unit_minutes sets another limit"
            else:
                # Pods wait for a node, however long that takes.
                return ""
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
        result = defaultdict[int, list[float]](list)
        ended = [it for it in self._history.trials if it.status == "finished"]
        prepared = min((it.began + it.wall for it in ended), default=math.inf)
        for trial in ended:
            if trial.began >= prepared:
                result[trial.number // self._folds].append(trial.wall)
        return result

    def _busy(self, walls: dict[int, list[float]], elapsed: float) -> float:
        """Return how long the running units still take, one after another."""
        return sum(
            max(0.0, self._unit(it.number // self._folds, walls) - elapsed + it.began)
            for it in self._history.running.values()
        )

    def _unit(
        self, index: int, walls: dict[int, list[float]], kind: tuple[str, float] | None = None
    ) -> float:
        """Predict the wall time of a configuration's next unit.

        Args:
            kind: see `skipped`; None if it is not known yet.
        """
        if index in walls:
            return max(walls[index])
        costs, overhead = self._costs(), self._overhead(walls)
        if index < len(costs):
            kind = costs[index]
        if kind is None:
            # It is yet to be suggested.
            return statistics.fmean(statistics.fmean(it) for it in walls.values())
        family, cost = kind
        if same := [statistics.fmean(it) for n, it in walls.items() if costs[n][0] == family]:
            return max(same)
        rough = sum(costs[n][1] for n in walls)
        learning = sum(max(0.0, statistics.fmean(it) - overhead) for it in walls.values())
        return overhead + (cost * learning / rough if rough else 0.0)

    def _overhead(self, walls: dict[int, list[float]]) -> float:
        """Return the time that a unit takes besides learning.

        The fastest configuration takes little more, unless it is a network.
        """
        fastest = min((statistics.median(it) for it in walls.values()), default=UNIT_SECONDS)
        trials = self._history.trials
        return min(fastest, trials[0].began * _START) if self._networks and trials else fastest

    def _reserve(
        self,
        walls: dict[int, list[float]],
        elapsed: float,
        more: Mapping[int, float] | None = None,
    ) -> float:
        """Return what training, judging and registering the winner takes.

        Args:
            more: what a unit takes of a configuration that may become one of its members.
        """
        ended = Counter(
            trial.number // self._folds
            for trial in self._history.trials
            if trial.status == "finished"
        )
        complete = sum(count == self._folds for count in ended.values())
        if complete != self._chosen[0]:
            since = time.monotonic()
            self._chosen = complete, self._members()
            # The board chooses once for all records, and once without each fold.
            self._board = (self._folds + 1) * (time.monotonic() - since)
        overhead = self._overhead(walls)
        members = {index: self._unit(index, walls) for index in self._chosen[1]} | dict(more or {})
        learning = sum(max(0.0, unit - overhead) for unit in members.values())
        first, began = self._history.trials[0].wall if walls else 0.0, self._began(elapsed)
        # The first unit also waits for a server, which imports about as long as the command does.
        prepared = max(0.0, first - overhead - began)
        again = max(_FINISH * overhead + prepared, _AGAIN * began)
        return learning * self._more + again + self._board

    def _longest(self, elapsed: float) -> float:
        """Return the longest time of a unit of the first configuration so far.

        It is 0 where the first configuration costs next to nothing, as a network does not.
        """
        if not self._networks:
            return 0.0
        first = self._history.trials[: self._folds]
        ended = [it.wall for it in first if it.status == "finished"]
        running = [elapsed - it.began for it in first if it.status == "running"]
        return max([*ended, *running], default=0.0)

    def _began(self, elapsed: float) -> float:
        """Return the time of the command until its first unit."""
        trials = self._history.trials
        return trials[0].began if trials else elapsed
