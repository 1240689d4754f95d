"""What a study found and will take, as objects and as lines of text."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.quantities import duration, is_number, money, number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.rungs import Rungs
from steadytrain.components.tune.study import Study, study_name

UNKNOWN: Final = "known once the data are prepared"
"""What a dry run says of steps that follow from epochs."""
BEST, SUMMARY = "best.yaml", "tuning.json"
WINNER = "winner.yaml"
"""The run with the best of the models that were trained on fresh seeds, once that is known."""


def best(study: Study) -> Trial | None:
    """Return the finished trial with the best first objective; None if none has finished."""
    result: Trial | None = None
    for trial in study.history.trials:
        result = better(study, result, trial)
    return result


def better(study: Study, first: Trial | None, second: Trial) -> Trial | None:
    """Return the better one of two trials; the second counts only if it has finished."""
    if not _counts(study, second):
        return first
    sign = signs(study)[0]

    def key(trial: Trial) -> tuple[float, int]:
        return sign * study.history.values(trial)[0], trial.number

    return second if first is None or key(second) < key(first) else first


def front(study: Study) -> list[Trial]:
    """Return the finished trials that no other one equals or beats in every objective."""
    directions, finished = signs(study), _finished(study)
    scores = {
        trial.number: [
            sign * value
            for sign, value in zip(directions, study.history.values(trial), strict=True)
        ]
        for trial in finished
    }

    def beaten(trial: Trial) -> bool:
        score = scores[trial.number]
        return any(
            other != score and all(a <= b for a, b in zip(other, score, strict=True))
            for other in scores.values()
        )

    return [trial for trial in finished if not beaten(trial)]


def best_config(study: Study) -> RunConfig | None:
    """Return the configuration of the best trial as an independent run; None if none finished.

    The run exports the model with the best first objective.
    """
    winner, objective = best(study), study.tune.objective
    if winner is None:
        return None
    config = study.trial_config(winner.params)
    by = {
        "metric_for_best_model": objective.metric,
        "greater_is_better": objective.direction == "maximize",
    }
    training = config.training.model_copy(update=by)
    return config.model_copy(update={"run": None, "training": training})


def summary(study: Study) -> dict[str, Any]:
    """Return what a study found and spent, for programs."""
    history, winner = study.history, best(study)
    standings = Counter(trial.status for trial in history.trials)
    hours = study.hours
    return {
        "study": study_name(study.config),
        "objectives": [item.model_dump() for item in study.tune.objectives],
        "best_trial": winner and winner.number,
        "best_params": dict(winner.params) if winner else None,
        "best_score": history.values(winner)[0] if winner else None,
        "pareto_front": [
            {"trial": item.number, "params": dict(item.params), "scores": history.values(item)}
            for item in front(study)
        ],
        "trials": len(history.trials),
        "trials_completed": standings["finished"],
        "trials_stopped_early": standings["discarded"] + standings["paused"],
        "trials_failed": standings["failed"],
        "trials_running": standings["running"],
        "failures": dict(Counter(item.failure for item in history.trials if item.failure)),
        "steps": study.steps,
        "tokens": study.tokens,
        "seconds": round(history.seconds, 3),
        "usd": study.usd(hours),
    }


def signs(study: Study) -> list[float]:
    """Return 1 for each objective that is minimized, and -1 for the others."""
    return [-1.0 if item.direction == "maximize" else 1.0 for item in study.tune.objectives]


def write_results(study: Study, folder: Path) -> None:
    """Write `best.yaml`, if a trial has finished, and `tuning.json`."""
    storage, config = LocalStorage(folder), best_config(study)
    if config is not None:
        storage.write(BEST, config.to_yaml().encode())
    storage.write(SUMMARY, f"{json.dumps(summary(study), indent=2)}\n".encode())


def _finished(study: Study) -> Sequence[Trial]:
    return [trial for trial in study.history.trials if _counts(study, trial)]


def _counts(study: Study, trial: Trial) -> bool:
    values = study.history.values(trial) if trial.status == "finished" else [math.nan]
    return not any(map(math.isnan, values))


@dataclass(frozen=True)
class Forecast:
    """What is left of a study.

    trials, steps: still to come. Steps are estimates.
    seconds: of training, over all trials together; None if no trial has trained yet.
    usd: None if the price is unknown as well.
    """

    trials: int
    steps: int
    seconds: float | None
    usd: float | None

    @classmethod
    def of(cls, study: Study) -> Forecast:
        """Return the forecast of a running study, from the speed of its trials so far."""
        budget, history = study.tune.budget, study.history
        if (known := study.expected) is not None:
            left, wall = known
            taken = wall * budget.parallel
            return cls(left, 0, taken, study.usd(taken / 3600))
        left = max(0, budget.trials - len(history.trials))
        steps = expected_steps(study.rungs, budget.trials)
        if budget.steps is not None:
            steps = min(steps, budget.steps)
        steps = max(0, steps - study.steps)
        done = sum(trial.reached for trial in history.trials)
        seconds = history.seconds / done * steps if done else None
        usd = None if seconds is None else study.usd(seconds / 3600)
        return cls(left, steps, seconds, usd)


def expected_steps(rungs: Rungs, trials: int) -> int:
    """Return the optimizer steps of a study if each rung lets through what it should."""
    total = 0
    for bracket in range(rungs.brackets):
        before = 0
        for index in range(bracket, len(rungs.cuts)):
            total += rungs.most(bracket, index, trials) * (rungs.cuts[index] - before)
            before = rungs.cuts[index]
    if not rungs.by_median:
        return total
    # On average, half of the trials end at each rung; the first ones pass.
    total, going, before = 0, float(trials), 0
    for cut in rungs.cuts:
        total += round(going * (cut - before))
        going, before = max(min(going, 5.0), going / 2), cut
    return total


class Lines:
    """Shows a study as lines of text."""

    def __init__(
        self, say: Callable[[str], object], describe: Callable[[Trial], str] | None = None
    ) -> None:
        """Report each line.

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
    return "" if pace.trial_every == pace.every else f"; {pace.trial_step(pace.full):,} steps"


def spent(study: Study) -> str:
    """Return in words how many trials failed, and what all of them took."""
    price, history = study.usd(study.hours), study.history
    cost = f", {money(price)}" if price else ""
    return f"{history.failed} failed; {duration(history.seconds)} of training{cost}"


def ending(study: Study) -> list[str]:
    """Return lines on what a study found."""
    winner, history = best(study), study.history
    lines = ["", f"trials  {len(history.trials):,}, {spent(study)}"]
    if winner is not None:
        scores = ", ".join(
            f"{item.metric} {number(value)}"
            for item, value in zip(study.tune.objectives, history.values(winner), strict=True)
        )
        lines += [f"best    trial {winner.number}: {scores}", f"        {as_words(winner.params)}"]
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
