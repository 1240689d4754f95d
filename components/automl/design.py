"""The design of a search: the portfolio on all folds, then configurations around the best ones.

It is a study whose log holds the portfolio that it began with. Configuration by configuration, a
trial trains on all folds but one; a small table is divided several times. What follows the
portfolio is suggested by TPE, in the two families that lead. A suggestion depends on all
configurations but the one before it, and waits for them: so the order in which trials end changes
nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from steadytrain.components.automl.networks import FIRST
from steadytrain.components.automl.portfolio import (
    MONOTONE,
    RATE,
    Configuration,
    Family,
    families,
    portfolio,
)
from steadytrain.components.automl.time_limit import TimeLimit
from steadytrain.components.preprocess.inspection import has_records
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import NETWORKS, TABULAR_MULTI_LABEL
from steadytrain.components.shared.config.tune import (
    FOLDS,
    REPEATS,
    AblationConfig,
    AutoMLBudget,
    Quality,
    TuneConfig,
)
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput, DataError, StorageError
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.train.launch.launcher import jobs_for
from steadytrain.components.train.step import load_trainer
from steadytrain.components.tune.cross_validation import fold_sizes
from steadytrain.components.tune.designs import without_search
from steadytrain.components.tune.history import History, Params, Trial
from steadytrain.components.tune.samplers import Suggester
from steadytrain.components.tune.space import Fits, seed_of
from steadytrain.components.tune.study import NewDesign
from steadytrain.components.tune.trials.base import most_at_once

_FOLD: Final = "cross_validation.fold"
_SETTINGS: Final = "model.config"
_FAST: Final = 8
"""Configurations of the quality `fast`."""
_LEADING: Final = 2
"""Families that are searched after the portfolio."""
_MOST_AT_ONCE: Final = 8
_SHARE: Final = 0.9
"""Share of the memory that the units may take."""
_FOLDS_IN_TIME: Final = 3
"""Rolling origins, each of which takes from what the first one learns from."""
_DECISIONS: Final = {
    "tabular_classification": ("likeliest", "balanced_accuracy", "macro_f1"),
    TABULAR_MULTI_LABEL: ("likeliest", "macro_f1"),
}
"""What decisions may be made for, by task."""
_SMALL: Final = 2000
"""Records below which folds are repeated."""
_SHORT: Final = 0.25
"""Hours below which they are not."""
Score = Callable[[int], float | None]
"""The mean loss of a configuration over all folds, by its number; None if a fold is missing, and
infinite if it misses a limit, so that its family does not lead by it."""
Members = Callable[[], Sequence[int]]
"""The indices of the configurations that would be trained again if the search ended now."""


def as_automl(config: RunConfig, *, in_pods: bool = False) -> RunConfig:
    """Return the configuration of the study that a search is.

    Args:
        in_pods: whether units are jobs on a cluster, where as many train as find room.

    Raises:
        BadInput: it holds out a fold itself, no configuration keeps the constraints, or
            it decides about classes without any.
        DataError: the data cannot be read as records.
    """
    chosen, quality = config.automl, config.automl.quality or "good"
    if config.cross_validation.fold is not None:
        raise BadInput(
            f"{_FOLD} = {config.cross_validation.fold}: a search holds out every fold in turn",
            remedy="leave it out",
        )
    if config.data.in_time and (chosen.repeats or 1) > 1:
        raise BadInput(
            f"automl.repeats = {chosen.repeats}: folds follow each other in time",
            remedy="leave it out",
        )
    if chosen.decision not in (known := _DECISIONS.get(config.data.task, ("likeliest",))):
        raise BadInput(
            f"automl.decision = {chosen.decision!r}: {config.data.task} is decided by "
            f"{' or '.join(known)}",
            remedy="use that, or leave it out",
        )
    _check_monotone(config)
    if chosen.constraints.memory_gb is not None and (in_pods or jobs_for(config.compute)):
        raise BadInput(
            f"automl.constraints.memory_gb = {chosen.constraints.memory_gb:g}: units in pods have "
            "the memory of their pods",
            remedy="set compute.pods.memory instead",
        )
    named = {item.framework for item in families().values() if config.data.task in item.tasks}
    if unknown := sorted({*chosen.constraints.frameworks} - named):
        raise BadInput(
            f"automl.constraints.frameworks: no family of models for {config.data.task} has "
            f"{unknown[0]!r}",
            remedy=f"use one of {', '.join(sorted(named))}",
        )
    entries, skipped = portfolio(config)
    if not entries:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        monotone = " and model.config.monotone" if config.model.config.get(MONOTONE) else ""
        raise BadInput(
            f"automl.constraints{monotone} leave no configuration: {reasons}",
            remedy="relax them, or install the packages",
        )
    ordered = config.data.in_time
    folds = _FOLDS_IN_TIME if ordered else FOLDS[quality]
    repeats = 1 if ordered else chosen.repeats or _repeats(config, quality)
    first = min(_fast(config), len(entries)) if quality == "fast" else len(entries)
    units = _units(chosen.budget, folds * repeats)
    units = units or int(most_configurations(config, first)) * folds * repeats
    if units < folds * repeats:
        raise BadInput(
            f"automl.budget.units = {units}: a configuration is trained {folds * repeats} times, "
            "once without each fold",
            remedy=f"give at least {folds * repeats} for each configuration to compare",
        )
    # The other limits of `tune` are those of its own command.
    own = TuneConfig(log=config.tune.log, max_failed_share=config.tune.max_failed_share)
    tune = without_search(own, units)
    limits = chosen.budget.model_dump(include={"usd"})
    compute, training = config.compute, dict[str, Any]()
    if config.data.task not in NETWORKS:
        # The board counts the steps of the lowest loss.
        steps = max(item.max_steps for item in families().values())
        training = {"max_steps": steps, "eval_steps": 1}
        if compute.device == "auto":
            # Trees use no GPU, and units that train at once cannot share one.
            compute = compute.model_copy(update={"device": "cpu", "nccl": {}})
    most = _MOST_AT_ONCE if in_pods else min(most_at_once(compute), _MOST_AT_ONCE)
    parallel = chosen.budget.parallel or most
    return config.model_copy(
        update={
            "compute": compute,
            "tune": tune.model_copy(
                update={
                    "seed": config.tune.seed,
                    "budget": tune.budget.model_copy(update={**limits, "parallel": parallel}),
                }
            ),
            "ablation": AblationConfig(),
            "automl": chosen.model_copy(update={"quality": quality}),
            "cross_validation": config.cross_validation.model_copy(
                update={"folds": folds, "repeats": repeats, "compare": {}}
            ),
            "training": config.training.model_copy(
                update={**training, "metric_for_best_model": None, "greater_is_better": None}
            ),
        }
    )


def _fast(config: RunConfig) -> int:
    """Return the number of configurations of the quality `fast`."""
    return FIRST if config.data.task in NETWORKS else _FAST


def _check_monotone(config: RunConfig) -> None:
    given = config.model.config.get(MONOTONE, {})
    signs = given.values() if isinstance(given, dict) else [given]
    if any(sign not in (1, -1) or isinstance(sign, bool) for sign in signs):
        raise BadInput(
            f"model.config.monotone = {given!r:.200}: it does not map columns to 1 or -1",
            remedy="write {column: 1} for outputs that rise with the column, or -1",
        )
    task = config.data.task
    if given and not any(item.monotone for item in families().values() if task in item.tasks):
        raise BadInput(
            f"model.config.monotone = {given!r:.200}: no family of models for {task} keeps it",
            remedy="leave it out",
        )


def most_configurations(config: RunConfig, first: int) -> float:
    """Return how many configurations a search compares at most, if its budget does not say it.

    Args:
        first: configurations of its portfolio.
    """
    if config.automl.budget.units or config.automl.budget.trials:
        return math.inf
    return 2 * first if config.automl.quality == "best" else first


def _units(budget: AutoMLBudget, each: int) -> int | None:
    """Return the units that a budget asks for, if it does.

    Args:
        each: units of a configuration.
    """
    asked = [budget.units, budget.trials and budget.trials * each]
    return min(filter(None, asked), default=None)


def _repeats(config: RunConfig, quality: Quality) -> int:
    """Return how often to divide the training side: more than once if the source is small.

    With little time, or where each takes long as a network does, more configurations are worth
    more than more folds of each.
    """
    hours = config.automl.budget.hours
    little = config.data.task in NETWORKS or (hours is not None and hours < _SHORT)
    if REPEATS[quality] == 1 or little:
        return 1
    try:
        return 1 if has_records(config.data, _SMALL) else REPEATS[quality]
    except (BadInput, StorageError):
        # They are not on this machine: the search step, which reads them, decides.
        return 1


def _memory_of_a_unit(config: RunConfig) -> float:
    """Return the bytes that a unit's processes on this machine may take."""
    if jobs_for(config.compute) is not None:
        return math.inf
    if config.automl.constraints.memory_gb is not None:
        return config.automl.constraints.memory_gb * 1e9
    return _SHARE * host_memory() / config.tune.budget.parallel


def first_configurations(config: RunConfig) -> list[Params]:
    """Return the portfolio, for the log of a new search: what cannot learn from the data is last.

    Raises:
        DataError: the data cannot be divided into folds, or nothing can learn from them.
    """
    shortest, known = fold_sizes(config).shortest, families()
    entries, _ = portfolio(config)
    judged = [replace(item, unfit=_unfit(known[item.family], shortest)) for item in entries]
    fit = [item for item in judged if not item.unfit]
    if not fit:
        reasons = "; ".join(f"{item.name}: {item.unfit}" for item in judged)
        raise DataError(
            f"no configuration can learn from the data: {reasons}",
            remedy="give more times of each series",
        )
    count = _fast(config) if config.automl.quality == "fast" else len(fit)
    return [item.as_plain() for item in (*fit[:count], *(it for it in judged if it.unfit))]


def planned(queued: Iterable[Params]) -> tuple[list[Configuration], dict[str, str]]:
    """Return the configurations of a portfolio from a log, and why others have no units."""
    configurations = [Configuration(**item) for item in queued]
    unfit = {item.name: item.unfit for item in configurations if item.unfit}
    return [item for item in configurations if not item.unfit], unfit


def _unfit(family: Family, shortest: int | None) -> str:
    if shortest is None or shortest >= family.least_times:
        return ""
    return (
        f"it needs {family.least_times} times of each series, and the first fold learns the "
        f"shortest one from {shortest}; lower data.series.horizon, or give more times"
    )


class SearchDesign(Suggester):
    """Suggests the units of a search in their order."""

    def __init__(
        self, config: RunConfig, history: History, score: Score, members: Members = list
    ) -> None:
        self.folds, self._seed = config.cross_validation.splits, config.tune.seed
        self._history, self._score = history, score
        self._config = config
        self._budget = config.tune.budget.trials
        self._families = families()
        self._most_memory = _memory_of_a_unit(config)
        self._time = TimeLimit(config, history, self._costs, members)

    def _costs(self) -> list[tuple[str, float]]:
        return [(item.family, self._families[item.family].seconds) for item in self.configurations]

    def skipped(self, number: int, params: Params, elapsed: float) -> str:
        name = self._searched(number // self.folds, params).family
        return self._time.skipped(number, (name, self._families[name].seconds), elapsed)

    def overdue(self, trial: Trial, elapsed: float, since_prepared: float | None) -> str:
        return self._time.overdue(trial, elapsed, since_prepared)

    def expected(self, elapsed: float) -> tuple[int, float] | None:
        most = most_configurations(self._config, len(self._portfolio)) * self.folds
        return self._time.expected(int(min(most, self._budget)), elapsed)

    @property
    def most_memory(self) -> float:
        return self._most_memory

    def out_of_time(self, elapsed: float) -> bool:
        return self._time.out_of_time(elapsed)

    def too_many_failed(self, history: History, tune: TuneConfig) -> str:
        """Return that the first configurations all failed, if they did.

        A configuration that fails costs no other. But if none of the first ones can be trained,
        something else is wrong.
        """
        share, count = tune.max_failed_share, tune.budget.trials // self.folds
        first = max(2, int(share * count) + 1)
        failed = {
            trial.number // self.folds for trial in history.trials if trial.status == "failed"
        }
        if not failed.issuperset(range(first)):
            return ""
        return (
            f"the first {first} configurations failed, and tune.max_failed_share = {share:g} of "
            f"{count} may before one can be trained"
        )

    @property
    def configurations(self) -> list[Configuration]:
        """All configurations that have begun, and those of the portfolio."""
        result = self._portfolio
        for number in range(len(result) * self.folds, len(self._history.trials), self.folds):
            result.append(self._searched(len(result), self._history.trials[number].params))
        return result

    @property
    def _portfolio(self) -> list[Configuration]:
        """The configurations of the portfolio that have units."""
        return planned(self._history.queued)[0]

    def ready(self, number: int) -> bool:
        index, fold = divmod(number, self.folds)
        if fold or index < len(self._portfolio):
            return True
        needed = self._history.trials[: (index - 1) * self.folds]
        return all(trial.number not in self._history.running for trial in needed)

    def suggest(self, number: int, fixed: Params, fits: Fits) -> Params | None:  # noqa: ARG002
        index, fold = divmod(number, self.folds)
        first_ones = self._portfolio
        if fold:
            first = self._history.trials[index * self.folds].params
            return {**first, _FOLD: fold}
        if number + self.folds > self._budget:
            # Without all its folds, it would be compared with nothing.
            return None
        if index < len(first_ones):
            configuration = first_ones[index]
            return {**configuration.fields(self._families[configuration.family]), _FOLD: 0}
        if index >= most_configurations(self._config, len(first_ones)):
            return None
        settings = self._sampled(index)
        if settings is None:
            return None
        family, values = settings
        kept = {name: it for name, it in first_ones[0].settings.items() if name == MONOTONE}
        configuration = Configuration("", family, {**values, **kept})
        return {**configuration.fields(self._families[family]), _FOLD: 0}

    def configuration(self, trial: Trial) -> int:
        """Return the index of the configuration that a trial trains."""
        return trial.number // self.folds

    def fold(self, trial: Trial) -> int:
        """Return the fold that a trial holds out: of all divisions, one after another."""
        return trial.number % self.folds

    def _searched(self, index: int, params: Mapping[str, Any]) -> Configuration:
        """Return a configuration that was suggested, by what its first trial trains."""
        config, rate = dict(params.get(_SETTINGS, {})), params["training.learning_rate"]
        fitting = {
            name: len(item.config)
            for name, item in self._families.items()
            if self._config.data.task in item.tasks
            and item.framework == params["model.framework"]
            and item.config.items() <= config.items()
        }
        # A package's family may narrow one of ours.
        family = max(fitting, key=lambda name: fitting[name])
        varied = {
            name: it for name, it in config.items() if name not in self._families[family].config
        }
        dotted = self._families[family].dotted
        varied |= {name: params[name] for name in dotted if name in params}
        settings = varied if rate is None else {**varied, RATE: rate}
        return Configuration(f"{family} {index + 1}", family, settings)

    def _sampled(self, index: int) -> tuple[str, Mapping[str, Any]] | None:
        """Return a family and the settings that TPE suggests in it; None if no family leads."""
        # Optuna takes half a second to import.
        from optuna import samplers
        from optuna.trial import create_trial

        from steadytrain.components.tune.optuna_storage import OptunaStudy, distribution, sampled

        known = [
            (item, score)
            for number, item in enumerate(self.configurations[: index - 1])
            if (score := self._score(number)) is not None and self._families[item.family].space
        ]
        # The best of a family counts.
        fit = sorted(((item, it) for item, it in known if math.isfinite(it)), key=_by_score)
        leading = list(dict.fromkeys(item.family for item, _ in fit))
        if not leading:
            return None
        turn = index - len(self._portfolio)
        name = leading[:_LEADING][turn % min(_LEADING, len(leading))]
        space = self._families[name].space
        study = OptunaStudy(["minimize"])
        for item, score in known:
            if item.family == name:
                set_ones = [key for key in space if key in item.settings]
                given = {_field(key): item.settings[key] for key in set_ones}
                spread = {_field(key): distribution(_field(key), space[key]) for key in set_ones}
                study.study.add_trial(
                    create_trial(params=given, distributions=spread, values=[score])
                )
        sampler = samplers.TPESampler(seed=seed_of(self._seed, index), n_startup_trials=3)
        with warnings.catch_warnings(action="ignore"):
            trial = study.ask(len(study.study.trials), sampler)
            values = {key: sampled(trial, _field(key), it) for key, it in space.items()}
        if self._config.data.task not in NETWORKS:
            return name, values
        # What is not searched, such as the sizes of its layers, is that of the best network.
        best = next(item for item, _ in fit if item.family == name)
        return name, {**best.settings, **values}


def _by_score(pair: tuple[Configuration, float]) -> float:
    return pair[1]


def _field(setting: str) -> str:
    """Return the field that a setting is: whether its values are whole depends on it."""
    if "." in setting:
        return setting
    return f"training.{RATE}" if setting == RATE else f"{_SETTINGS}.{setting}"


def new_design(
    folder: Path,
    score: Callable[[RunConfig, Path, Sequence[Trial]], float | None],
    members: Callable[[RunConfig, History, Path], Sequence[int]],
) -> NewDesign:
    """Return what makes the design of a search.

    Args:
        folder: of the study.
        score: returns the mean loss of a configuration (`Score`), from the configuration of the
            study, the folder and the trials of all folds.
        members: see `Members`.
    """

    def design(config: RunConfig, history: History) -> SearchDesign:
        folds = config.cross_validation.splits

        def mean(index: int) -> float | None:
            trials = history.trials[index * folds : (index + 1) * folds]
            return score(config, folder, trials) if len(trials) == folds else None

        return SearchDesign(
            config,
            history,
            mean,
            lambda: members(config, history, folder),
        )

    return design


def described(config: RunConfig) -> Callable[[Trial], str]:
    """Return what describes a trial: its configuration and its fold."""
    known = families()
    names = {
        value_digest(item.fields(known[item.family])): item.name for item in portfolio(config)[0]
    }

    def words(trial: Trial) -> str:
        sets = {field: value for field, value in trial.params.items() if field != _FOLD}
        configuration_number = trial.number // config.cross_validation.splits + 1
        kind = sets.get(_SETTINGS, {}).get("model_type", "network")
        model = f"{kind} {configuration_number}"
        name = names.get(value_digest(sets), model)
        return f"{name}, {config.cross_validation.named(trial.params[_FOLD])} held out"

    return words


def shared_imports(config: RunConfig) -> list[str]:
    """Return the modules that all units of a search on this machine share."""
    entries, _ = portfolio(config)
    known = families()
    if config.data.task in NETWORKS:
        # Those of a cross-validation are enough.
        return []
    frameworks = dict.fromkeys(known[item.family].framework for item in entries)
    return [
        module for name in frameworks for module in getattr(load_trainer(name), "imports", ())
    ] + [
        "pyarrow.parquet",
        "steadytrain.components.series.errors",
        "steadytrain.components.tabular.explained",
        "steadytrain.components.tasks.built_in",
        "steadytrain.components.train.framework.ensemble",
    ]
