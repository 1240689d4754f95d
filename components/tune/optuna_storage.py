"""The study as Optuna sees it, in memory. Nothing else of steadytrain touches Optuna's studies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import optuna
from optuna import samplers
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from steadytrain.components.shared.config import Dimension, TuneConfig
from steadytrain.components.shared.config.space import is_whole
from steadytrain.components.tune.history import History, Trial

_STATES: Final = {
    "running": TrialState.RUNNING,
    "paused": TrialState.PRUNED,
    "discarded": TrialState.PRUNED,
    "finished": TrialState.COMPLETE,
    "failed": TrialState.FAIL,
    "skipped": TrialState.FAIL,
}
_START: Final = datetime(2000, 1, 1, tzinfo=UTC).replace(tzinfo=None)
"""Optuna wants a time of each trial, and no sampler uses it."""


class OptunaStudy:
    """An Optuna study whose trials can be replaced."""

    def __init__(self, directions: Sequence[Literal["minimize", "maximize"]]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage = _Replaceable()
        self.study = optuna.create_study(storage=self._storage, directions=list(directions))

    def put(self, trial: FrozenTrial) -> None:
        """Add a trial, or replace the one with its number."""
        known = self._storage.get_n_trials(self.study._study_id)
        if trial.number < known:
            self._storage.replace(self.study._study_id, trial)
        else:
            self.study.add_trial(trial)

    def ask(self, number: int, sampler: BaseSampler) -> optuna.Trial:
        """Return a new trial to suggest values for. It replaces an earlier one of that number."""
        self.study.sampler = sampler
        if number < self._storage.get_n_trials(self.study._study_id):
            blank = create_trial(state=TrialState.RUNNING)
            blank.number = number
            self._storage.replace(self.study._study_id, blank)
            return optuna.Trial(
                self.study, self._storage.get_all_trials(self.study._study_id)[number]._trial_id
            )
        return self.study.ask()


class _Replaceable(InMemoryStorage):
    def replace(self, study_id: int, trial: FrozenTrial) -> None:
        """Put a trial in the place of the one with its number."""
        with self._lock:
            trials = self._studies[study_id].trials
            trial._trial_id = trials[trial.number]._trial_id
            trials[trial.number] = trial


def frozen_trials(tune: TuneConfig, history: History, rung: int | None = None) -> list[FrozenTrial]:
    """Return all trials as Optuna describes them."""
    return [frozen(tune, history, trial, rung) for trial in history.trials]


def frozen(
    tune: TuneConfig, history: History, trial: Trial, rung: int | None = None
) -> FrozenTrial:
    """Return a trial as Optuna describes it.

    A trial that pauses, or that went on from a pause, counts as pruned with its scores so far, so
    that the sampler learns from them. A trial without a usable score counts as failed.

    Args:
        rung: where trials are compared: those that reached it count as complete, with their values
            there, and the others are left out. None means at the end, for an export.
    """
    values = history.values(trial, math.inf if rung is None else rung)
    broken = any(math.isnan(value) for value in values)
    state = _STATES[trial.status]
    if state == TrialState.RUNNING and trial.scores:
        state = TrialState.PRUNED
    if rung is not None and state == TrialState.PRUNED:
        # Samplers leave failed trials out, and learn from those that break a constraint.
        left_out = state if trial.too_slow else TrialState.FAIL
        state = TrialState.COMPLETE if trial.has_reached(rung) else left_out
    if broken and state in (TrialState.COMPLETE, TrialState.PRUNED):
        state = TrialState.FAIL
    sign = -1.0 if history.objectives[0].direction == "maximize" else 1.0
    scores = trial.scores if len(history.objectives) == 1 else {}
    made = FrozenTrial(
        number=trial.number,
        state=state,
        value=None,
        values=values if state == TrialState.COMPLETE else None,
        datetime_start=_START,
        datetime_complete=_START if state.is_finished() else None,
        params={field: encoded(tune.space[field], value) for field, value in trial.params.items()},
        distributions={field: distribution(field, tune.space[field]) for field in trial.params},
        user_attrs={"failure": trial.failure} if trial.failure else {},
        system_attrs={},
        intermediate_values={
            step: sign * score for step, score in scores.items() if math.isfinite(score)
        },
        trial_id=trial.number,
    )
    if trial.excess_ms is not None:
        made.set_constraint("latency_ms", trial.excess_ms)
    made._validate()
    return made


def distribution(field: str, dimension: Dimension) -> BaseDistribution:
    """Return a dimension for Optuna."""
    if dimension.choices is not None:
        return CategoricalDistribution([as_text(choice) for choice in dimension.choices])
    low, high = dimension.ends
    if is_whole(field, dimension):
        step = int(dimension.step or 1)
        return IntDistribution(int(low), int(high), log=dimension.log, step=step)
    return FloatDistribution(low, high, log=dimension.log, step=dimension.step)


def encoded(dimension: Dimension, value: Any) -> Any:
    """Return a value as Optuna stores it. Choices are JSON text, which is never ambiguous."""
    return value if dimension.choices is None else as_text(value)


def as_text(value: object) -> str:
    """Return a choice as JSON text."""
    return json.dumps(value, sort_keys=True)


def sampled(trial: optuna.Trial, field: str, dimension: Dimension) -> Any:
    """Let Optuna choose the value of a field."""
    if dimension.choices is not None:
        return json.loads(trial.suggest_categorical(field, list(map(as_text, dimension.choices))))
    low, high = dimension.ends
    if is_whole(field, dimension):
        step = int(dimension.step or 1)
        return trial.suggest_int(field, int(low), int(high), log=dimension.log, step=step)
    return trial.suggest_float(field, low, high, log=dimension.log, step=dimension.step)


def sampler_of(tune: TuneConfig, seed: int, *, random: bool) -> BaseSampler:
    """Return a new sampler.

    Args:
        random: use random search in place of the study's own sampler.
    """
    if tune.sampler == "random" or random:
        return samplers.RandomSampler(seed=seed)
    if tune.sampler == "gp":
        return samplers.GPSampler(seed=seed)
    # With conditions, fields that occur together are sampled together.
    conditional = any(dimension.when for dimension in tune.space.values())
    return samplers.TPESampler(seed=seed, multivariate=True, group=conditional)
