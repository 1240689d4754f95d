"""Boosted trees of LightGBM that learn all series together, from the features of mlforecast."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from steadytrain.components.series.errors import Value, histories_of, read_values
from steadytrain.components.series.learner import (
    SeriesLearner,
    described,
    export_with_code,
    repeating_dates,
)
from steadytrain.components.series.model import (
    DATE_FEATURES,
    LEVEL,
    Calendar,
    SeriesModel,
    TreesModel,
    naive_scale,
)
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned, LearnerTrainer
from steadytrain.components.train.framework.learner import State
from steadytrain.components.train.framework.lightgbm import (
    RATE,
    ROUNDS,
    SETTINGS,
    Array,
    added,
    exact,
    merged,
    next_trees,
    threads_for,
)

_FEATURES: Final = ("lags", "windows", "differences", "date_features")
_OBJECTIVES: Final = ("regression", "regression_l1", "huber")
_LAGS: Final = 12
"""The last values that are features, if the season is not shorter."""
_ORIGINS: Final = 12
"""Forecasts of the validation side from which intervals are measured."""


class BoostingLearner(SeriesLearner):
    """A step adds `model.config.rounds_per_step` trees to those before it.

    They learn the next value of each series. Forecasts use them again and again: what is forecast
    of one time is a feature of the next. Random numbers depend on the number of steps alone.

    The loss of a step is the mean squared error of the next value, in variances of the differences
    of its series; on the validation side, it is the mean absolute scaled error of its forecasts
    from the training side.

    parts: the trees of each step.
    raw: what all trees add up to: (rows, 1).
    """

    libraries = ("mlforecast", "lightgbm", "pandas")
    parts: list[bytes]
    raw: Array

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.given = {name: it for name, it in config.model.config.items() if name != "model_type"}
        shared = described("lightgbm", config, data)
        _check_settings(config, self.given)
        calendar = Calendar(**shared["calendar"])
        self.model = TreesModel(**shared, features=_features(self.given, shared))
        self.rounds = _count("rounds_per_step", self.given.pop("rounds_per_step", ROUNDS))
        self.seed, self.rate = config.training.seed, config.training.learning_rate or RATE
        self.past = read_values(data, calendar, "train")
        self.held_out = read_values(data, calendar, "validation")
        pasts, known = histories_of(self.past, calendar.step)
        try:
            _, self.matrix, self.targets = self.model.matrix(pasts, known)
        except ValueError as error:
            raise BadInput(
                f"mlforecast cannot make features of these series: {error}",
                remedy="change model.config.lags, windows or differences, or leave short series "
                "out",
            ) from error
        self.threads = threads_for(self.matrix.size, config.compute)
        self.binned: Any = None
        self.restore({"trees": np.zeros(0, np.uint8), "sizes": np.zeros(0, np.int64)})

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        import lightgbm

        rate = self.rate * learning_rate_scale
        settings = {
            "objective": "regression",
            **self.given,
            **exact(seed=self.seed, step=len(self.parts), rate=rate, threads=self.threads),
        }
        try:
            if self.binned is None:
                self.binned = lightgbm.Dataset(
                    self.matrix, self.targets, params=settings, free_raw_data=False
                ).construct()
            self._add(next_trees(settings, self.binned, self.raw, self.rounds))
        except lightgbm.basic.LightGBMError as error:
            raise BadInput(
                f"model.config: LightGBM refuses a setting: {str(error)[:300]}",
                remedy="change it, or leave it out",
            ) from error
        return Learned(float(np.square(self.raw[:, 0] - self.targets).mean()), rate)

    def _add(self, part: bytes) -> None:
        leaves, (more,) = added(part, self.threads, self.matrix)
        self.parts.append(part)
        self.parameters += leaves
        self.raw = self.raw + more

    def state(self) -> State:
        sizes = np.array([len(part) for part in self.parts], np.int64)
        return {"trees": np.frombuffer(b"".join(self.parts), np.uint8).copy(), "sizes": sizes}

    def restore(self, state: State) -> None:
        self.parts, self.parameters = [], 0
        self.raw = np.zeros((len(self.targets), 1))
        ends = np.cumsum(state["sizes"]).tolist()
        for start, end in pairwise([0, *ends]):
            self._add(state["trees"][start:end].tobytes())

    def learned_model(self) -> TreesModel:
        self.model.trees = merged([part.decode() for part in self.parts]).model_to_string()
        return self.model

    def export(self, folder: Path) -> None:
        model = self.learned_model()
        model.widths = interval_widths(model, self.past, self.held_out)
        export_with_code(model, folder)


def interval_widths(
    model: SeriesModel, past: Sequence[Value], held_out: Sequence[Value]
) -> list[float]:
    """Return half the width of the interval of each time ahead, from forecasts of held-out values.

    Forecasts begin at up to `_ORIGINS` times of the held-out side. The width is the quantile of
    their errors in those of the seasonal naive forecast, over all series, as in split conformal
    prediction (Lei et al. 2018), and no smaller than that of a time before.

    Returns:
        `model.horizon` numbers.
    """
    step, horizon = model.calendar.step, model.horizon
    ends = {name: it.last for name, it in histories_of(past, step)[0].items()}
    every, known = histories_of([*past, *held_out], step)
    truth = {(one.series, one.ordinal): one.value for one in held_out}
    deviations: list[list[float]] = [[] for _ in range(horizon)]
    for origin in sorted({*np.linspace(0, horizon - 1, _ORIGINS).round().astype(int).tolist()}):
        limit = {name: end + step * origin for name, end in ends.items()}
        seen = [one for one in [*past, *held_out] if one.ordinal <= limit[one.series]]
        pasts, _ = histories_of(seen, step)
        ahead = {name: (every[name].last - it.last) // step for name, it in pasts.items()}
        pasts = {name: it for name, it in pasts.items() if ahead[name] > 0}
        if not pasts:
            continue
        forecasts = model.forecasts(pasts, {name: ahead[name] for name in pasts}, known)
        for name, it in pasts.items():
            scale = naive_scale(it.values, model.season)
            for index, value in enumerate(forecasts[name]["prediction"][:horizon]):
                true = truth.get((name, it.last + step * (index + 1)))
                if true is not None and scale > 0:
                    deviations[index].append(abs(value - true) / scale)
    return widths_of(deviations)


def widths_of(apart: Iterable[Iterable[float]]) -> list[float]:
    """Return half the width of the interval of each time ahead, from the errors there."""
    widths = list[float]()
    for several in apart:
        ordered, width = sorted(several), widths[-1] if widths else 0.0
        if ordered:
            rank = min(len(ordered), math.ceil((len(ordered) + 1) * LEVEL / 100))
            width = max(width, float(ordered[rank - 1]))
        widths.append(width)
    return widths


def _check_settings(config: RunConfig, given: Mapping[str, Any]) -> None:
    name = config.model.config.get("model_type")
    if name != "lightgbm":
        raise BadInput(
            f"model.config.model_type = {name!r}: model.framework mlforecast trains lightgbm",
            remedy="set it to lightgbm",
        )
    allowed = sorted({*SETTINGS, *_FEATURES, "rounds_per_step", "objective"})
    if unknown := sorted(given.keys() - {*allowed}):
        raise BadInput(
            f"model.config.{unknown[0]} = {given[unknown[0]]!r}: mlforecast with lightgbm has no "
            "such setting here",
            remedy=f"use {', '.join(allowed)}",
        )
    if given.get("objective", _OBJECTIVES[0]) not in _OBJECTIVES:
        raise BadInput(
            f"model.config.objective = {given['objective']!r}: forecasts have no such loss",
            remedy=f"use {', '.join(_OBJECTIVES)}",
        )


def _features(given: dict[str, Any], shared: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Take the settings of features out of `given`, with defaults for those that are absent.

    Differences hide what covariates explain, because those of the time before are not known to the
    trees. So there are none by default with covariates.
    """
    calendar, season = Calendar(**shared["calendar"]), shared["season"]
    seasonal = [season] if season > 1 else []
    defaults: dict[str, list[Any]] = {
        "lags": sorted({*range(1, min(max(season, 3), _LAGS) + 1), *seasonal}),
        "windows": seasonal or [3],
        "differences": [] if shared["covariates"] else seasonal or [1],
    }
    columns = dict[str, list[Any]]()
    for name, default in defaults.items():
        values = given.pop(name, default)
        if not isinstance(values, list):
            raise BadInput(
                f"model.config.{name} = {values!r}: it is no list", remedy=f"use {default}"
            )
        columns[name] = [_count(name, value) for value in values]
    dates = given.pop("date_features", repeating_dates(calendar))
    wrong = [name for name in dates if name not in DATE_FEATURES] if isinstance(dates, list) else []
    if not isinstance(dates, list) or wrong or (dates and calendar.kind == "number"):
        reason = "whole numbers are no dates" if calendar.kind == "number" else "not all are known"
        raise BadInput(
            f"model.config.date_features = {dates!r}: {reason}",
            remedy=f"leave it out, or use some of {', '.join(DATE_FEATURES)}",
        )
    if not columns["lags"] and not columns["windows"] and not dates:
        raise BadInput("model.config.lags = []: nothing to learn from", remedy="leave it out")
    return {**columns, "dates": dates}


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise BadInput(
            f"model.config.{name} has {value!r}: it is not a whole number above 0",
            remedy="use numbers such as 1",
        )
    return value


MLFORECAST: Final = LearnerTrainer(BoostingLearner)
