"""A study's report."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from steadytrain.components.pages.charts import (
    WIDE,
    Point,
    Series,
    nice_ticks,
    parallel,
    plot,
    scatter,
    thin,
    tick_label,
)
from steadytrain.components.pages.html import html
from steadytrain.components.shared.quantities import duration, is_number, money, number
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.tune.history import Trial
from steadytrain.components.tune.results import best, front, signs
from steadytrain.components.tune.study import Study, study_name

PAGE: Final = "report.html"
_ROWS: Final = 200
"""Trials in the table. The charts show all."""


def write_page(page: str, folder: Path) -> None:
    """Write the report of a study to its folder."""
    LocalStorage(folder).write(PAGE, page.encode())


def study_html(template: str, study: Study, **content: Any) -> str:
    """Return a page about a study."""
    return html(
        template,
        kind=template.replace("_", "-"),
        name=study_name(study.config),
        failures=Counter(item.failure for item in study.history.trials if item.failure),
        config_text=study.config.to_yaml(),
        **content,
    )


def time_tile(study: Study) -> tuple[str, str, str]:
    """Return the training time of a study, and its price if that is known."""
    usd = study.usd(study.hours)
    return "Training time", duration(study.history.seconds), "" if usd is None else money(usd)


def render(study: Study) -> str:
    """Return the report as HTML."""
    winner = best(study)
    drawn = _drawn(study, winner)
    scored = [item for item in drawn if math.isfinite(item.score)]
    return study_html(
        "study",
        study,
        goal=", ".join(f"{item.direction} {item.metric}" for item in study.tune.objectives),
        best=winner,
        best_params=_shown(winner.params) if winner else {},
        tiles=_tiles(study, winner),
        curves=_curves(study, drawn),
        history=_history(study, scored),
        importance=[(name, [f"{one:.0%}"], one) for name, one in importance(study).items()],
        slices=list(_slices(study, scored)),
        parallel=_parallel(study, scored),
        rungs=_rung_rows(study),
        front=[
            (trial.number, map(number, study.history.values(trial)))
            for trial in (front(study) if len(study.tune.objectives) > 1 else [])
        ],
        objectives=[item.metric for item in study.tune.objectives],
        fields=[field.rpartition(".")[2] for field in study.tune.space],
        rows=[_row(study, trial) for trial in _ranked(study)[:_ROWS]],
        left_out=max(0, len(study.history.trials) - _ROWS),
    )


def importance(study: Study) -> Mapping[str, float]:
    """Return the importance of each field by PED-ANOVA (Watanabe et al. 2023), largest first.

    Empty if fewer than four trials have finished, or with several objectives.
    """
    finished = [trial for trial in study.history.trials if trial.status == "finished"]
    if len(finished) < 4 or len(study.tune.objectives) > 1:
        return {}
    import optuna

    from steadytrain.components.tune.optuna_storage import OptunaStudy, frozen_trials

    optuna_study = OptunaStudy([study.tune.objective.direction])
    for trial in frozen_trials(study.tune, study.history):
        optuna_study.put(trial)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings(action="ignore"):
        try:
            return optuna.importance.get_param_importances(optuna_study.study, evaluator=evaluator)
        except (ValueError, RuntimeError):
            # The finished trials share no field, or all have the same score.
            return {}


@dataclass(frozen=True)
class _Drawn:
    """A trial as the charts draw it."""

    trial: Trial
    kind: str
    title: str
    score: float

    def series(self, points: Sequence[Point]) -> Series:
        return Series(self.kind, points, self.title)

    def dot(self, x: float) -> Series:
        return Series(self.kind, dots=[((x, self.score), self.title)])


def _drawn(study: Study, found: Trial | None) -> list[_Drawn]:
    """Return all trials, the best one last, so that it is drawn over the others."""
    order, drawn = ("failed", "stopped", "finished", "best"), []
    for trial in study.history.trials:
        kind: str = trial.status if trial.status in order else "stopped"
        if found is not None and trial.number == found.number:
            kind = "best"
        shown = ", ".join(f"{name} {value}" for name, value in _shown(trial.params).items())
        title = f"trial {trial.number}, step {trial.reached}: {number(_score(study, trial))}"
        item = _Drawn(trial, f"trial {kind}", f"{title}; {shown}", _score(study, trial))
        drawn.append((order.index(kind), item))
    return [item for _, item in sorted(drawn, key=lambda pair: pair[0])]


def _score(study: Study, trial: Trial) -> float:
    return study.history.values(trial)[0]


def _curves(study: Study, drawn: Sequence[_Drawn]) -> Markup:
    """Draw the validation curves of all trials over steps, with the rungs as vertical lines."""
    metric, rungs, lines = study.tune.objective.metric, study.rungs.cuts, []
    for item in drawn:
        points = [(float(step), result.get(metric, math.nan)) for step, result in item.trial.curve]
        if finite := [point for point in points if math.isfinite(point[1])]:
            lines.append(item.series(thin(finite, 100)))
    if not lines:
        return Markup("")
    values = sorted(y for line in lines for _, y in line.points)
    return plot(
        f"Validation {metric} of all trials",
        f"{len(lines)} trials, rungs at steps {', '.join(map(str, rungs))}",
        lines,
        axis="step",
        x=(0, rungs[-1]),
        labels=[(rung, f"{rung:,}") for rung in rungs],
        # A trial that diverges would press all others into one line.
        ticks=nice_ticks(values[0], values[int(0.95 * (len(values) - 1))]),
        marks=[(rung, "") for rung in rungs],
        width=WIDE,
    )


def _history(study: Study, scored: Sequence[_Drawn]) -> Markup:
    sign, falling = signs(study)[0], list[Point]()
    for item in sorted(scored, key=lambda item: item.trial.number):
        at, score = float(item.trial.number), item.score
        if item.trial.status != "finished":
            continue
        if not falling or sign * score < sign * falling[-1][1]:
            falling += [(at, falling[-1][1])] if falling else []
            falling.append((at, score))
    dots = [item.dot(item.trial.number) for item in scored]
    return scatter("Score of each trial where it ended", dots, "trial", through=falling)


def _slices(study: Study, scored: Sequence[_Drawn]) -> Iterator[tuple[str, Markup]]:
    for field, dimension in study.tune.space.items():
        choices = dimension.choices or []
        dots = [
            item.dot(float(choices.index(value) if choices else value))
            for item in scored
            if field in item.trial.params
            for value in [item.trial.params[field]]
        ]
        names = [str(choice)[:12] for choice in choices]
        if chart := scatter(field, dots, field, log=dimension.log, names=names):
            yield field, chart


def _parallel(study: Study, scored: Sequence[_Drawn]) -> Markup:
    if not scored:
        return Markup("")
    space, scores = study.tune.space, [item.score for item in scored]
    low, high = min(scores), max(scores)
    axes = []
    for field, dimension in space.items():
        ends = dimension.choices or dimension.ends
        axes.append((field.rpartition(".")[2], _end(ends[0]), _end(ends[-1])))
    axes.append((study.tune.objective.metric, number(low), number(high)))
    lines = [
        item.series(
            [
                *(
                    (float(index), _height(dimension, item.trial.params[field]))
                    for index, (field, dimension) in enumerate(space.items())
                    if field in item.trial.params
                ),
                (float(len(space)), (item.score - low) / (high - low or 1.0)),
            ]
        )
        for item in scored
    ]
    return parallel("Parameters and score of each trial", axes, lines)


def _height(dimension: Any, value: Any) -> float:
    if dimension.choices:
        return float(dimension.choices.index(value) / (len(dimension.choices) - 1))
    low, high = dimension.ends
    if dimension.log:
        return math.log(value / low) / math.log(high / low)
    return float((value - low) / (high - low))


def _rung_rows(study: Study) -> list[tuple[str, list[int]]]:
    """Return bracket and step, and how many trials reached it, went on, ended and wait there."""
    rows = []
    for (bracket, until), rung in sorted(study.history.by_rung.items()):
        there = [study.history.trials[item] for _, item in rung.reached]
        ended = sum(t.status == "discarded" and t.until == until for t in there)
        waiting = sum(t.status == "paused" and t.until == until for t in there)
        final = until == study.rungs.cuts[-1]
        onward = 0 if final else len(there) - ended - waiting
        name = f"{bracket}: {until:,}" if study.rungs.brackets > 1 else f"{until:,}"
        rows.append((name, [len(there), onward, ended, waiting]))
    return rows


def _tiles(study: Study, found: Trial | None) -> list[tuple[str, str, str]]:
    history = study.history
    standings = Counter(trial.status for trial in history.trials)
    full = len(history.trials) * study.rungs.cuts[-1]
    tiles = [
        (
            "Trials",
            f"{len(history.trials):,}",
            f"{standings['finished']:,} finished, {history.failed:,} failed",
        ),
        (
            "Steps",
            f"{study.steps:,}",
            f"{study.steps / full:.0%} of all trials in full" if full else "",
        ),
        time_tile(study),
    ]
    if found is not None:
        metric = study.tune.objective.metric
        tiles.insert(0, (f"Best {metric}", number(_score(study, found)), f"trial {found.number}"))
    return tiles


def _ranked(study: Study) -> Sequence[Trial]:
    """Return the trials that got furthest first, and among those the best first."""
    sign = signs(study)[0]

    def key(trial: Trial) -> tuple[int, float, int]:
        score = _score(study, trial)
        return -trial.reached, math.inf if math.isnan(score) else sign * score, trial.number

    return sorted(study.history.trials, key=key)


def _row(study: Study, trial: Trial) -> tuple[int, list[str]]:
    score, shown = _score(study, trial), _shown(trial.params)
    return trial.number, [
        {"discarded": "stopped early"}.get(trial.status, trial.status),
        f"{trial.reached:,}",
        "" if math.isnan(score) else number(score),
        *(shown.get(field, "") for field in study.tune.space),
        duration(trial.seconds),
        trial.failure or ", ".join(trial.fallbacks),
    ]


def _shown(params: Mapping[str, Any]) -> dict[str, str]:
    return {field: _short(value) for field, value in params.items()}


def _short(value: Any) -> str:
    return number(value) if is_number(value) else str(value)


def _end(value: Any) -> str:
    return tick_label(value) if is_number(value) else str(value)
