"""CMA-ES (Hansen 2016, "The CMA Evolution Strategy: A Tutorial") as a function of the history.

Optuna's own sampler keeps the state of its search in attributes of Optuna's trials, which a study's
log does not hold. Here, the state follows from the trials: the package `cmaes` gets them generation
by generation, in the order of their numbers. CMA-ES uses only the order of the scores,
so a trial that got further counts as better than one that ended at an earlier rung. Failed trials
do not count.

Only ranges without a condition have the order and the distances that CMA-ES needs. Fields with
choices, and those with a condition, are drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from steadytrain.components.shared.config import TuneConfig
from steadytrain.components.tune.history import History, Params, Trial
from steadytrain.components.tune.space import (
    TRIES,
    Fits,
    in_order,
    nothing_fits,
    seed_of,
    share_of,
    value_at,
    varies,
)

if TYPE_CHECKING:
    from cmaes import CMA

_CENTER: Final = 0.5
_SPREAD: Final = 1 / 6
"""First standard deviation, as a share of each range: Optuna's."""


class Evolution:
    """Suggestions by CMA-ES from all trials so far."""

    def __init__(self, tune: TuneConfig, history: History) -> None:
        self._tune, self._history = tune, history
        self._fields = in_order(tune.space)
        self._searched = tune.ranges

    def suggest(self, number: int, given: Params, fits: Fits) -> Params | None:
        space, told = self._tune.space, self._told()
        for attempt in range(TRIES):
            seed = seed_of(self._tune.seed, number, attempt)
            point = dict(zip(self._searched, self._optimizer(seed, told).ask(), strict=True))
            chance, params = random.Random(seed), dict[str, Any]()
            for field in self._fields:
                share = min(float(point.get(field, chance.random())), 1 - 1e-9)
                if varies(space, field, params):
                    params[field] = given.get(field, value_at(field, space[field], share))
            if fits(params):
                return params
        raise nothing_fits(number)

    def note(self, trial: Trial) -> None:
        """Do nothing: each suggestion reads the history."""

    def _told(self) -> Sequence[Trial]:
        return [item for item in self._history.trials if item.scores and item.standing != "failed"]

    def _optimizer(self, seed: int, told: Sequence[Trial]) -> CMA:
        """Return the optimizer after all complete generations."""
        # numpy and cmaes take a tenth of a second to import.
        import numpy as np
        from cmaes import CMA

        count = len(self._searched)
        bounds = np.array([[0.0, 1.0]] * count)
        made = CMA(mean=np.full(count, _CENTER), sigma=_SPREAD, bounds=bounds, seed=seed)
        for start in range(0, len(told) - made.population_size + 1, made.population_size):
            generation = sorted(told[start : start + made.population_size], key=_order)
            made.tell([(np.array(self._point(item)), rank) for rank, item in enumerate(generation)])
        return made

    def _point(self, trial: Trial) -> list[float]:
        space = self._tune.space
        return [share_of(field, space[field], trial.params[field]) for field in self._searched]


def _order(trial: Trial) -> tuple[bool, int, float, int]:
    """Return what sorts trials from best to worst."""
    rung = max(trial.scores)
    return trial.too_slow, -rung, trial.scores[rung], trial.number
