"""Suggestions of parameters, each a function of the study's seed, the number and the history.

Optuna's samplers keep random state, and one that is created again repeats itself. So each
suggestion has a sampler of its own, whose seed comes from the study's seed and the trial's number:
a driver that was started again suggests what an undisturbed one would have.

CMA-ES (Hansen 2016, "The CMA Evolution Strategy: A Tutorial") as a function of the history.

Optuna's own sampler keeps the state of its search in attributes of Optuna's trials, which a study's
log does not hold. Here, the state follows from the trials: the package `cmaes` gets them generation
by generation, in the order of their numbers. CMA-ES uses only the order of the scores,
so a trial that got further counts as better than one that ended at an earlier rung. Failed trials
do not count.

Only ranges without a condition have the order and the distances that CMA-ES needs. Fields with
choices, and those with a condition, are drawn at random.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from steadytrain.components.shared.config import Dimension, TuneConfig
from steadytrain.components.tune.history import History, Params, Trial
from steadytrain.components.tune.space import (
    TRIES,
    Fits,
    as_text,
    in_order,
    nothing_fits,
    seed_of,
    share_of,
    value_at,
    values_of,
    varies,
)

if TYPE_CHECKING:
    import optuna

    from steadytrain.components.tune.optuna_storage import OptunaStudy

_OWN_TRIES: Final = 20
"""Tries with the sampler itself. Later ones are random, since it may insist on what does not
fit."""
_LARGEST_GRID: Final = 100_000
"""The most that `tune.budget.trials` can be."""


class Suggester(Protocol):
    """Suggests the parameters of trials."""

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:
        """Return the parameters of a trial; None if the space has no more.

        Args:
            fixed: values of some fields that are set already.

        Raises:
            BadInput: nothing was found that fits.
        """

    def ready(self, number: int) -> bool:  # noqa: ARG002
        """Return whether the trials that this one depends on have ended."""
        return True

    def note(self, trial: Trial) -> None:  # noqa: ARG002
        """Note that a trial started, reported, paused or ended."""
        return

    def skipped(self, number: int, params: Params, elapsed: float) -> str:  # noqa: ARG002
        """Return why a trial is not to start; "" if it is.

        Args:
            elapsed: seconds of wall time that the study has taken.
        """
        return ""

    def overdue(self, trial: Trial, elapsed: float, since_prepared: float | None) -> str:  # noqa: ARG002
        """Return why a running trial is to be killed; "" if it is not.

        Args:
            elapsed: as for `skipped`.
            since_prepared: see `TrialState`.
        """
        return ""

    def expected(self, elapsed: float) -> tuple[int, float] | None:  # noqa: ARG002
        """Return how many trials are still to start, and the seconds until the last one ends.

        None if only the steps of the trials so far tell.
        """
        return None

    @property
    def most_memory(self) -> float:
        """Bytes that the processes of a trial on this machine may take together."""
        return math.inf

    def out_of_time(self, elapsed: float) -> bool:  # noqa: ARG002
        """Return whether the study has taken all of its wall time."""
        return False

    def too_many_failed(self, history: History, tune: TuneConfig) -> str:
        """Return what failed too often for the study to go on; "" if it may."""
        budget, share = tune.budget.trials, tune.max_failed_share
        if history.failed <= share * budget:
            return ""
        return (
            f"{history.failed} of {len(history.trials)} trials failed, and "
            f"tune.max_failed_share = {share:g} of {budget} trials may"
        )


def suggester_of(tune: TuneConfig, history: History) -> Suggester:
    """Return the suggester for a study's settings."""
    match tune.sampler:
        case "grid":
            return Grid(tune)
        case "qmc":
            return Sobol(tune)
        case "cmaes":
            return Evolution(tune, history)
        case _:
            return Sampler(tune, history)


class Sampler(Suggester):
    """Suggestions by an Optuna sampler that sees all trials so far."""

    def __init__(self, tune: TuneConfig, history: History) -> None:
        self._tune, self._history = tune, history
        self._fields = in_order(tune.space)
        self._study: OptunaStudy | None = None
        self._rung = 0

    def _compared(self) -> OptunaStudy:
        """Return the trials, compared at the rung where enough of them can be."""
        # Optuna takes half a second to import.
        from steadytrain.components.tune.optuna_storage import OptunaStudy, frozen_trials

        rung = self._history.compared_rung
        if self._study is None or rung != self._rung:
            directions = [item.direction for item in self._tune.objectives]
            self._study, self._rung = OptunaStudy(directions), rung
            for trial in frozen_trials(self._tune, self._history, rung):
                self._study.put(trial)
        return self._study

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:
        from steadytrain.components.tune.optuna_storage import sampler_of

        study = self._compared()
        for attempt in range(TRIES):
            seed = seed_of(self._tune.seed, number, attempt)
            with warnings.catch_warnings(action="ignore"):
                sampler = sampler_of(self._tune, seed, random=attempt >= _OWN_TRIES)
                params = self._suggest(study.ask(number, sampler), fixed)
            if fits(params):
                return params
        raise nothing_fits(number)

    def note(self, trial: Trial) -> None:
        from steadytrain.components.tune.optuna_storage import frozen

        if self._study is not None:
            self._study.put(frozen(self._tune, self._history, trial, self._rung))

    def _suggest(self, trial: optuna.Trial, fixed: Params) -> Params:
        from steadytrain.components.tune.optuna_storage import sampled

        space, params = self._tune.space, dict[str, Any]()
        for field in self._fields:
            if varies(space, field, params):
                known = field in fixed
                params[field] = fixed[field] if known else sampled(trial, field, space[field])
        return params


class Grid(Suggester):
    """Every combination of the space, once."""

    def __init__(self, tune: TuneConfig) -> None:
        self._combinations = list(itertools.islice(_combinations(tune.space), _LARGEST_GRID))

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:  # noqa: ARG002
        fitting = (params for params in self._combinations if fits(params))
        return next(itertools.islice(fitting, number, None), None)


class Sobol(Suggester):
    """A scrambled Sobol sequence: it covers the space more evenly than random samples."""

    def __init__(self, tune: TuneConfig) -> None:
        self._tune, self._fields = tune, in_order(tune.space)

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:
        from scipy.stats.qmc import Sobol as Sequence_

        for attempt in range(TRIES):
            seed = seed_of(self._tune.seed, 0, attempt)
            engine = Sequence_(len(self._fields), scramble=True, rng=seed)
            if number:  # scipy cannot go forward by 0
                engine.fast_forward(number)
            point = engine.random(1)[0]
            params = dict[str, Any]()
            for field, share in zip(self._fields, point, strict=True):
                if varies(self._tune.space, field, params):
                    dimension = self._tune.space[field]
                    params[field] = fixed.get(field, value_at(field, dimension, float(share)))
            if fits(params):
                return params
        raise nothing_fits(number)


def _combinations(space: Mapping[str, Dimension]) -> Iterator[Params]:
    fields = in_order(space)
    seen = set()
    # Of each dimension, no more values can be among the first combinations.
    dimensions = (values_of(field, space[field], _LARGEST_GRID) for field in fields)
    for values in itertools.product(*dimensions):
        params = dict[str, Any]()
        for field, value in zip(fields, values, strict=True):
            if varies(space, field, params):
                params[field] = value
        text = as_text(params)
        if text not in seen:
            seen.add(text)
            yield params


if TYPE_CHECKING:
    from cmaes import CMA

_CENTER: Final = 0.5
_SPREAD: Final = 1 / 6
"""First standard deviation, as a share of each range: Optuna's."""


class Evolution(Suggester):
    """Suggestions by CMA-ES from all trials so far."""

    def __init__(self, tune: TuneConfig, history: History) -> None:
        self._tune, self._history = tune, history
        self._fields = in_order(tune.space)
        self._searched = tune.ranges

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:
        space, scored = self._tune.space, self._scored()
        for attempt in range(TRIES):
            seed = seed_of(self._tune.seed, number, attempt)
            point = dict(zip(self._searched, self._optimizer(seed, scored).ask(), strict=True))
            chance, params = random.Random(seed), dict[str, Any]()
            for field in self._fields:
                share = min(float(point.get(field, chance.random())), 1 - 1e-9)
                if varies(space, field, params):
                    params[field] = fixed.get(field, value_at(field, space[field], share))
            if fits(params):
                return params
        raise nothing_fits(number)

    def _scored(self) -> Sequence[Trial]:
        return [item for item in self._history.trials if item.scores and item.status != "failed"]

    def _optimizer(self, seed: int, scored: Sequence[Trial]) -> CMA:
        """Return the optimizer after all complete generations."""
        # numpy and cmaes take a tenth of a second to import.
        import numpy as np
        from cmaes import CMA

        count = len(self._searched)
        bounds = np.array([[0.0, 1.0]] * count)
        made = CMA(mean=np.full(count, _CENTER), sigma=_SPREAD, bounds=bounds, seed=seed)
        for start in range(0, len(scored) - made.population_size + 1, made.population_size):
            generation = sorted(scored[start : start + made.population_size], key=_order)
            made.tell([(np.array(self._point(item)), rank) for rank, item in enumerate(generation)])
        return made

    def _point(self, trial: Trial) -> list[float]:
        space = self._tune.space
        return [share_of(field, space[field], trial.params[field]) for field in self._searched]


def _order(trial: Trial) -> tuple[bool, int, float, int]:
    """Return what sorts trials from best to worst."""
    rung = max(trial.scores)
    return trial.too_slow, -rung, trial.scores[rung], trial.number
