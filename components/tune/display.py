"""A study as lines of text: a line per trial and rung, and how a study would go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.quantities import duration, is_number, money, number
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.results import Forecast, best, better
from steadytrain.components.tune.search import UNKNOWN
from steadytrain.components.tune.study import Study, study_name


class Lines:
    """Shows a study as lines of text."""

    def __init__(
        self, say: Callable[[str], object], describe: Callable[[Trial], str] | None = None
    ) -> None:
        """Say each line.

        Args:
            describe: returns a new trial in words; None for its parameters.
        """
        self._say = say
        self._describe = describe or (lambda trial: as_words(trial.params))
        self._best: Trial | None = None

    def resumed(self, study: Study) -> None:
        self._best = best(study)
        known, running = len(study.history.trials), len(study.running)
        name, trials = study_name(study.config), study.tune.budget.trials
        more = f"; {known:,} have begun, {running} of them are training" if known else ""
        self._say(f"study {name}: {trials:,} trials{more}")

    def started(self, study: Study, trial: Trial) -> None:
        more = f"goes on until step {trial.until:,} of {study.rungs.cuts[-1]:,}"
        self._say(f"trial {trial.number}: {more if trial.reached else self._describe(trial)}")

    def ended(self, study: Study, trial: Trial) -> None:
        self._best = better(study, self._best, trial)
        self._say(f"trial {trial.number}: {_status(study, trial)} | {_state(study, self._best)}")


def as_words(params: Mapping[str, Any]) -> str:
    """Return parameters in one line, without the names of their sections."""
    return ", ".join(
        f"{field.rpartition('.')[2]} {number(value) if is_number(value) else value}"
        for field, value in params.items()
    )


def outline(study: Study, samples: Sequence[Mapping[str, Any]], steps: int, cost: str) -> list[str]:
    """Return lines on what a study would do, for `--dry-run`.

    Args:
        samples: the parameters of the first trials.
        steps: optimizer steps of all trials together.
        cost: the estimated cost in words.
    """
    tune, rungs = study.tune, study.rungs
    full = tune.budget.trials * rungs.cuts[-1]
    goals = ", ".join(f"{item.direction} {item.metric}" for item in tune.objectives)
    limits = tune.budget.model_dump(exclude_none=True, exclude={"trials", "parallel"})
    brackets = f", {rungs.brackets} brackets" if rungs.brackets > 1 else ""
    return [
        f"study       {study_name(study.config)}",
        f"objective   {goals}",
        f"sampler     {tune.sampler}, {len(tune.space)} fields",
        f"rungs       {tune.pruner}: {', '.join(f'{cut:,}' for cut in rungs.cuts)} steps{brackets}",
        f"            {', '.join(f'{tokens:,}' for tokens in study.rung_tokens)} tokens"
        + (", in every trial, within a tenth" if tune.fidelity == "tokens" else ""),
        f"budget      {tune.budget.trials:,} trials, {tune.budget.parallel} at a time"
        + "".join(f", {name} {value:g}" for name, value in limits.items()),
        f"steps       about {steps:,}, {steps / full:.0%} of {full:,} without rungs",
        f"cost        {cost}",
        f"winner      trained again with fresh seeds ({tune.seeds}), evaluated and registered",
        *(
            f"trial {index}     {as_words(params)}{_own_steps(study, params)}"
            for index, params in enumerate(samples)
        ),
    ]


def outline_without_steps(config: RunConfig) -> list[str]:
    """Return lines on what a study would do, before its data are prepared."""
    tune = config.tune
    goals = ", ".join(f"{item.direction} {item.metric}" for item in tune.objectives)
    return [
        f"study       {study_name(config)}",
        f"objective   {goals}",
        f"sampler     {tune.sampler}, {len(tune.space)} fields",
        f"budget      {tune.budget.trials:,} trials, {tune.budget.parallel} at a time",
        f"steps       {UNKNOWN}: training.num_train_epochs is {config.training.num_train_epochs:g}",
        "            `steadytrain step preprocess` prepares them; so does the study itself",
    ]


def _own_steps(study: Study, params: Mapping[str, Any]) -> str:
    """Return the steps of a full trial in words, if they are not the study's."""
    pace = study.pace(params)
    return "" if pace.own_every == pace.every else f"; {pace.own(pace.full):,} steps"


def spent(study: Study) -> str:
    """Return in words how many trials failed, and what all of them took."""
    price, history = study.usd(study.hours), study.history
    cost = f", {money(price)}" if price else ""
    return f"{history.failed} failed; {duration(history.seconds)} of training{cost}"


def ending(study: Study) -> list[str]:
    """Return lines on what a study found."""
    found, history = best(study), study.history
    lines = ["", f"trials  {len(history.trials):,}, {spent(study)}"]
    if found is not None:
        scores = ", ".join(
            f"{item.metric} {number(value)}"
            for item, value in zip(study.tune.objectives, history.values(found), strict=True)
        )
        lines += [f"best    trial {found.number}: {scores}", f"        {as_words(found.params)}"]
    return lines


def _status(study: Study, trial: Trial) -> str:
    if trial.status == "failed":
        return f"failed ({trial.failure}): {trial.error.partition(chr(10))[0]}"
    if trial.too_slow:
        limit = study.tune.constraints.latency_ms or 0.0
        slow = number(limit + (trial.excess_ms or 0.0))
        return (
            f"ended at step {trial.reached:,}, latency {slow} ms is above "
            f"tune.constraints.latency_ms = {limit:g}"
        )
    word = {"finished": "finished at", "paused": "reached"}.get(trial.status, trial.status)
    metric = study.tune.objective.metric
    fallbacks = f", after {', '.join(trial.fallbacks)}" if trial.fallbacks else ""
    score = number(study.history.values(trial)[0])
    return f"{word} step {trial.reached:,}, {metric} {score}{fallbacks}"


def _state(study: Study, found: Trial | None) -> str:
    forecast = Forecast.of(study)
    parts = []
    if found is not None:
        parts.append(f"best {number(study.history.values(found)[0])} (trial {found.number})")
    parts.append(f"trials left: {forecast.trials:,}")
    if forecast.seconds is not None:
        parts.append(f"about {duration(forecast.seconds / study.tune.budget.parallel)}")
    if forecast.usd is not None:
        parts.append(money(forecast.usd))
    return ", ".join(parts)
