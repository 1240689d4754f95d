"""A study: what its log says, what it does next, what its budget still allows, and its export."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from steadytrain.components.shared.append_log import Record
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.config.fields import effect_of
from steadytrain.components.shared.config.load import validated
from steadytrain.components.shared.config.space import changed, tokens_per_step
from steadytrain.components.shared.config.tune import TuneConfig, TuneConstraints
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.effects import Use
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.redaction import redact
from steadytrain.components.train.recovery.takeover import changes
from steadytrain.components.tune.designs import (
    Design,
    FoldDesign,
    is_ablation,
    is_automl,
    is_cross_validation,
)
from steadytrain.components.tune.history import History, Next, Params, Trial, next_step, to_discard
from steadytrain.components.tune.log import Log, damaged
from steadytrain.components.tune.rungs import Pace, Rungs
from steadytrain.components.tune.samplers import Suggester, suggester_of
from steadytrain.components.tune.space import contains, satisfies
from steadytrain.components.tune.trials.base import TrialState
from steadytrain.components.tune.trials.folder import STUDIES

NewDesign = Callable[[RunConfig, History], Suggester]


def study_digest(config: RunConfig) -> str:
    """Return the digest of the settings that a study keeps from its first trial to its last."""
    counted = config.counted(Use.STUDY)
    of_others = {"ablation": not is_ablation(config)}
    of_others["cross_validation"] = not is_cross_validation(config)
    of_others["automl"] = not is_automl(config)
    return value_digest(
        {"run": config.digest()}
        | {name: value for name, value in counted.items() if not of_others.get(name)}
    )


def study_name(config: RunConfig) -> str:
    """Return the name of a study: `run`, or the configuration's name and the study's digest."""
    return config.run or f"{config.name}-{study_digest(config)[:8]}"


def check_space(config: RunConfig) -> None:
    """Raise BadInput if there is nothing to vary."""
    if not config.tune.space:
        raise BadInput(
            f"tune.space of {config.name} is empty: there is nothing to vary",
            remedy="name fields and their values, such as tune: {space: {training.learning_rate: "
            "{low: 1e-4, high: 1e-2, log: true}}}",
        )


def studies_folder(config: RunConfig) -> Path:
    """Return the folder of all studies of an output folder."""
    return Path(config.output).absolute() / STUDIES


def logs_address(config: RunConfig) -> str:
    """Return the address of the logs of all studies: `tune.log`, or the folder of the studies."""
    return config.tune.log or str(studies_folder(config))


def study_of(records: Sequence[Record]) -> tuple[RunConfig, History]:
    """Return the configuration and the history that a log describes, for reading only.

    Raises:
        BadInput: the log is empty or damaged.
    """
    text = records[0].get("config") if records else None
    if not isinstance(text, str):
        raise damaged("its first record has no configuration")
    config = load(text)
    history = _empty(config)
    for record in records:
        history.apply(record)
    return config, history


def _check_values(tune: TuneConfig, record: Record) -> None:
    """Reject a trial with a value that is not one of the space's.

    Raises:
        BadInput: the log is damaged.
    """
    for field, value in record["params"].items():
        if field in tune.space and not contains(field, tune.space[field], value):
            raise damaged(f"trial {record['number']} has {field} = {value!r:.80}, not of its space")


def _changed(before: str, now: RunConfig) -> str:
    """Return what differs from the configuration that a log has as text."""
    try:
        known = load(before)
    except BadInput:
        return "they are of another version"
    before_and_now = (config.model_dump(mode="json") for config in (known, now))
    found = [
        f"{name} {change}"
        for name, change in changes(*before_and_now)
        if effect_of(name).uses & (Use.RUN | Use.STUDY)
    ]
    return redact("; ".join(found))[:1000] or "they are of another version"


def _empty(config: RunConfig) -> History:
    best_counts = config.training.load_best_model_at_end
    return History(config.tune, Rungs.of(config), best_counts=best_counts)


def check_inputs(config: RunConfig, known: str, inputs: str) -> None:
    """Reject other data than those that a study began with.

    The trials keep what was prepared first, but the winner is trained on what is there then.

    Args:
        known: digest of the data when the study began; "" if it is unknown.
        inputs: digest of the data now; "" if it is unknown.

    Raises:
        BadInput: the data have changed.
    """
    if known and inputs and known != inputs:
        raise BadInput(
            f"data.source = {', '.join(config.data.source)[:200]}: the data have changed since "
            f"study {study_name(config)!r} began, and its scores are of the earlier data",
            remedy="restore the earlier data, or give the study another name (--run): it then "
            "begins again with the new data",
        )


class Study:
    """A study of one driver. Every change is written to the log before it takes effect.

    steps: optimizer steps of all trials together, with those that running trials still have to do,
        as the study counts them (`Pace`).
    tokens: the tokens of these steps, with full sequences.
    """

    def __init__(
        self,
        config: RunConfig,
        log: Log,
        *,
        first: Callable[[], Sequence[Params]] = list,
        design: NewDesign | None = None,
        inputs: str = "",
    ) -> None:
        """Rebuild a study from its log, or open a new one.

        Args:
            first: returns the parameters of the first trials, for a new study.
            design: returns what suggests the trials; None for what the configuration names.
            inputs: digest of the data (`Inputs.digest`); "" if it is unknown.

        Raises:
            BadInput: the log is damaged or belongs to a study with other settings or data.
            StorageError: the log cannot be read or written.
        """
        self.config, self._log, self.tune = config, log, config.tune
        self._skipped = list[Record]()
        self.rungs = Rungs.of(config)
        self.history = _empty(config)
        self.steps, self.tokens = 0, 0.0
        self._exhausted = False
        records = log.read()
        for record in records:
            self._apply(record)
        # A command has begun when its process did.
        running = max(0.0, time.time() - psutil.Process().create_time())
        self._began = time.monotonic() - running - self.history.elapsed
        self._suggester = (design or self._suggester_of)(config, self.history)
        self._open(first, inputs, records[0].get("config", "") if records else "")

    @property
    def running(self) -> Mapping[int, Trial]:
        """The trials that are training, or were when the last driver died."""
        return self.history.running

    @property
    def rung_tokens(self) -> list[int]:
        """The tokens at each rung, with the configuration's own batch size and full sequences."""
        return [cut * tokens_per_step(self.config, {}) for cut in self.rungs.cuts]

    @property
    def hours(self) -> float:
        """Hours of training that trials have reported."""
        return self.history.seconds / 3600

    @property
    def elapsed(self) -> float:
        """Seconds of wall time of all processes that drove the study, one after another."""
        return time.monotonic() - self._began

    @property
    def out_of_time(self) -> bool:
        """Whether a limit on wall time ends the study."""
        return self._suggester.out_of_time(self.elapsed)

    @property
    def expected(self) -> tuple[int, float] | None:
        """What is still to start, and how long that takes, if it is known (`Suggester`)."""
        return self._suggester.expected(self.elapsed)

    def overdue(self, trial: Trial, since_prepared: float | None) -> str:
        """Return why a running trial is to be killed; "" if it is not (`Suggester.overdue`)."""
        return self._suggester.overdue(trial, self.elapsed, since_prepared)

    @property
    def most_memory(self) -> float:
        """Bytes that the processes of a trial may take (`Suggester.most_memory`)."""
        return self._suggester.most_memory

    def usd(self, hours: float) -> float | None:
        """Return what hours of training cost; None if the price is unknown."""
        price = self.config.compute.price_per_hour
        return None if price is None else hours * price

    def pace(self, params: Params) -> Pace:
        """Return how a trial's own steps relate to the study's."""
        return Pace.of(self.config, params)

    def trial_config(self, params: Params) -> RunConfig:
        """Return the configuration of a trial.

        Raises:
            ConfigError: these values cannot be combined.
        """
        return validated(changed(self.config, {**params, **self.pace(params).settings()}))

    def next(self) -> Next | None:
        """Decide what trains next, and write it to the log; None if nothing can start now."""
        result = self._next()
        if self._skipped:
            self._append()
        return result

    def _next(self) -> Next | None:
        while not self.spent_out():
            result = next_step(self.history, self._can_reach, more=not self._exhausted)
            if result is None:
                return None
            number, until = result.number, result.until
            if number != self.history.next_number:
                self._record(kind="promoted", number=number, until=until)
                return result
            if not self._suggester.ready(number):
                return None
            params = self._suggester.suggest(number, self._queued_values(number), self._fits)
            if params is None or not self._affordable(params, 0, until):
                self._exhausted = True
                continue
            if not (reason := self._suggester.skipped(number, params, self.elapsed)):
                self._record(kind="started", number=number, params=params, until=until)
                return result
            self._record(kind="skipped", number=number, params=params, until=until, reason=reason)
        return None

    def report(self, number: int, state: TrialState, scores: str = "") -> None:
        """Write down that a trial reached its rung or finished.

        Args:
            scores: digest of the file with its scores on a held-out fold; "" if it left none.

        Raises:
            BadInput: its validations do not include the objective.
        """
        self._check_metrics(state)
        trial = self.history.trials[number]
        known = trial.curve[-1][0] if trial.curve else 0
        self._record(
            kind="reported",
            number=number,
            until=trial.until,
            step=state.step,
            finished=state.condition == "finished",
            validations=[
                [item.step, dict(item.metrics)] for item in state.validations if item.step > known
            ],
            seconds=round(state.seconds, 3),
            fallbacks=list(state.fallbacks),
            **({} if state.latency_ms is None else {"latency_ms": state.latency_ms}),
            **({"scores": scores} if scores else {}),
        )

    def check_inputs(self, inputs: str) -> None:
        """Reject other data than those that the study began with. See `check_inputs`."""
        check_inputs(self.config, self.history.inputs, inputs)

    def lose(self, number: int, reason: str) -> None:
        """Write down that what a finished trial left is damaged: it trains again."""
        self._record(kind="lost", number=number, reason=reason)

    def fail(self, number: int, failure: str, error: str, *, seconds: float = 0.0) -> None:
        """Write down that a trial failed, with the class of its failure."""
        self._record(
            kind="failed",
            number=number,
            failure=failure,
            error=error[:2000],
            seconds=round(seconds, 3),
        )

    def discard(self) -> list[int]:
        """Write down which paused trials can never go on, and return them."""
        result = to_discard(self.history)
        for number in result:
            self._record(kind="discarded", number=number)
        return result

    def spent_out(self, unreported_seconds: float = 0.0) -> bool:
        """Return whether the hours, the USD or the wall time are spent.

        Args:
            unreported_seconds: time that running trials have spent since their last report.
        """
        budget, hours = self.tune.budget, self.hours + unreported_seconds / 3600
        usd = self.usd(hours)
        return (
            (budget.hours is not None and hours >= budget.hours)
            or (budget.usd is not None and usd is not None and usd >= budget.usd)
            or self.out_of_time
        )

    def too_many_failed(self) -> str:
        """Return what failed more than `max_failed_share` allows; "" if nothing did."""
        return self._suggester.too_many_failed(self.history, self.tune)

    @staticmethod
    def _suggester_of(config: RunConfig, history: History) -> Suggester:
        if is_ablation(config):
            return Design(config)
        if is_cross_validation(config):
            return FoldDesign(config)
        return suggester_of(config.tune, history)

    def _open(self, first: Callable[[], Sequence[Params]], inputs: str, before: str) -> None:
        digest = study_digest(self.config)
        if not self.history.study:
            queued = [dict(item) for item in first()]
            text = self.config.to_yaml()
            known = {"inputs": inputs} if inputs else {}
            self._record(kind="opened", study=digest, queued=queued, config=text, **known)
        elif self.history.study != digest:
            raise BadInput(
                f"the study's log belongs to other settings: {_changed(before, self.config)}",
                remedy="undo the change, or give the study another name (--run); `tune "
                "--from` takes over the best trials of another study",
            )
        self.check_inputs(inputs)
        limits = self.tune.budget.model_dump(mode="json")
        if is_automl(self.config):
            limits["wall_hours"] = self.config.automl.budget.hours
        if limits != self.history.limits:
            self._record(kind="budget", limits=limits)

    def _queued_values(self, number: int) -> Params:
        """Return the values that a queued trial sets, as far as the space contains them."""
        queued = self.history.queued
        values = queued[number] if number < len(queued) else {}
        space = self.tune.space
        return {
            field: value
            for field, value in values.items()
            if field in space and contains(field, space[field], value)
        }

    def _fits(self, params: Params) -> bool:
        limits = self.tune.constraints
        if limits == TuneConstraints():
            # Building a configuration takes milliseconds.
            return True
        try:
            return satisfies(self.trial_config(params), limits)
        except ConfigError:
            return False

    def _can_reach(self, trial: Trial | None, until: int) -> bool:
        return self._affordable(trial.params if trial else {}, trial.reached if trial else 0, until)

    def _affordable(self, params: Params, reached: int, until: int) -> bool:
        budget = self.tune.budget
        tokens = self.tokens + self._tokens(params, reached, until)
        return (budget.steps is None or self.steps + until - reached <= budget.steps) and (
            budget.tokens is None or tokens <= budget.tokens
        )

    def _tokens(self, params: Params, reached: int, until: int) -> float:
        pace = self.pace(params)
        steps = pace.trial_step(until) - pace.trial_step(reached)
        return float(steps * tokens_per_step(self.config, params))

    def _check_metrics(self, state: TrialState) -> None:
        if not state.validations:
            return
        names = state.validations[-1].metrics
        for item in self.tune.objectives:
            if item.metric not in names:
                raise BadInput(
                    f"tune.objective.metric = {item.metric!r}: validations have no such metric",
                    remedy=f"one of {', '.join(names)}",
                )

    def _record(self, **record: Any) -> None:
        if is_automl(self.config):
            record["elapsed"] = round(self.elapsed, 3)
        # Nothing happens because of a trial that does not start: hundreds are written at once.
        if record["kind"] == "skipped":
            self._skipped.append(record)
        else:
            self._append(record)
        self._apply(record)
        if record["kind"] not in ("opened", "budget"):
            self._suggester.note(self.history.trials[record["number"]])

    def _append(self, *records: Record) -> None:
        self._log.append(*self._skipped, *records)
        self._skipped.clear()

    def _apply(self, record: Record) -> None:
        self.history.apply(record)
        if record["kind"] == "started":
            _check_values(self.tune, record)
        if record["kind"] in ("started", "promoted"):
            trial = self.history.trials[record["number"]]
            self.steps += trial.until - trial.reached
            self.tokens += self._tokens(trial.params, trial.reached, trial.until)


_MARK: Final = "steadytrain"
"""Attribute of the studies that exports wrote."""


def check_storage(url: str) -> None:
    """Check that an Optuna storage can be used. If it is a database that is missing, create it.

    Raises:
        BadInput: it cannot be used.
    """
    import optuna

    with _storage_errors(url):
        optuna.get_all_study_names(url)


def export(study: Study, url: str) -> str:
    """Write a study, in place of what an earlier export wrote, and return its name there.

    Args:
        url: an Optuna storage, such as sqlite:///study.db.

    Raises:
        BadInput: the storage cannot be used, or has a study of that name that is no export.
    """
    import optuna

    from steadytrain.components.tune.optuna_storage import frozen_trials

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    name = study_name(study.config)
    directions = [item.direction for item in study.tune.objectives]
    with _storage_errors(url):
        known = {item.study_name: item for item in optuna.get_all_study_summaries(url)}
        if name in known and _MARK not in known[name].user_attrs:
            raise BadInput(
                f"--export-optuna {redact(url)}: it has a study {name} that is not an export",
                remedy="delete it there, or give another storage",
            )
        if name in known:
            optuna.delete_study(study_name=name, storage=url)
        made = optuna.create_study(storage=url, study_name=name, directions=directions)
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            made.set_user_attr(_MARK, True)
            made.set_metric_names([item.metric for item in study.tune.objectives])
        made.add_trials(frozen_trials(study.tune, study.history))
    return name


@contextlib.contextmanager
def _storage_errors(url: str) -> Iterator[None]:
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        # SQLAlchemy and the database's driver raise their own errors.
        raise BadInput(
            f"--export-optuna {redact(url)}: {redact(str(error))}",
            remedy="give an address that Optuna takes, such as sqlite:///study.db",
        ) from error
