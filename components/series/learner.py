"""Models of statsforecast, which fit each series on its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from steadytrain.components.series import model as exported
from steadytrain.components.series.errors import (
    Value,
    errors,
    histories_of,
    read_series,
    read_values,
)
from steadytrain.components.series.model import DAY, Calendar, SeriesModel, shown
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned, LearnerTrainer
from steadytrain.components.train.framework.learner import State

MODULE: Final = "model.py"
"""File of an exported model that can load it."""
MODEL_TYPES: Final = ("auto_arima", "auto_ets", "auto_theta", "seasonal_naive")

_ETS_SEASON: Final = 24


def export_with_code(model: SeriesModel, folder: Path) -> None:
    """Write a model, with the file that can load it."""
    model.save(folder)
    shutil.copyfile(exported.__file__, folder / MODULE)


class SeriesLearner:
    """A learner that reads all series at once: its validation and its export.

    past, held_out: values of the training and of the validation side.
    """

    learns_all = True
    on_cpu = True
    metric = "loss"
    greater_is_better = False
    parameters = 0
    past: Sequence[Value]
    held_out: Sequence[Value]

    def learned_model(self) -> SeriesModel:
        """Return what has been learned so far."""
        raise NotImplementedError

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        del rows
        measured = errors(self.learned_model(), self.past, self.held_out)
        return {
            "loss": float(measured["scaled_error"].mean()),
            "rmse": float(np.sqrt(measured["squared_error"].mean())),
            "mae": float(measured["absolute_error"].mean()),
        }

    def export(self, folder: Path) -> None:
        export_with_code(self.learned_model(), folder)


class StatisticalLearner(SeriesLearner):
    """One step fits all series. They are fitted again to the history of each forecast.

    The loss is the mean absolute scaled error: of a step, that of the last times of the training
    side from those before; on the validation side, that of its times from the training side.
    """

    libraries = ("statsforecast.models",)
    stores_rows = True

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        given = dict(config.model.config)
        name = given.pop("model_type", None)
        if name not in MODEL_TYPES:
            raise BadInput(
                f"model.config.model_type = {name!r}: statsforecast has no such model here",
                remedy=f"use {', '.join(MODEL_TYPES)}",
            )
        if config.data.series.covariates:
            raise BadInput(
                f"data.series.covariates = {config.data.series.covariates}: {name} learns from the "
                "values alone",
                remedy="leave it out, or use model.framework mlforecast",
            )
        rate, patience = config.training.learning_rate, config.training.early_stopping_patience
        for field, value in (("learning_rate", rate), ("early_stopping_patience", patience)):
            if value is not None:
                raise BadInput(
                    f"training.{field} = {value:g}: {name} is fitted in one step",
                    remedy="leave it out",
                )
        if given:
            raise BadInput(
                f"model.config.{min(given)} = {given[min(given)]!r}: {name} has no such setting",
                remedy="leave it out",
            )
        self.model = new_model(str(name), config, data)
        if name == "auto_ets" and self.model.season > _ETS_SEASON:
            raise BadInput(
                f"model.config.model_type = {name!r}: it learns no season of {self.model.season} "
                f"times, but of {_ETS_SEASON} at most",
                remedy="use auto_theta or auto_arima, or set data.series.season",
            )
        calendar = self.model.calendar
        self.past = read_values(data, calendar, "train")
        self.held_out = read_values(data, calendar, "validation")
        self.starts = self._starts()

    def _starts(self) -> dict[str, int]:
        """Return the ordinal after which each series is forecast in the step.

        Short series keep as many of their times as the model needs.

        Raises:
            DataError: a series has too few.
        """
        pasts, _ = histories_of(self.past, self.model.calendar.step)
        least = self.model.least + 1
        if short := [name for name, it in pasts.items() if len(it.values) < least]:
            raise DataError(
                f"{len(short):,} of {len(pasts):,} series are too short for "
                f"{self.model.model_type}, which needs {least} times to learn from: "
                f"{shown(short[0])} has {len(pasts[short[0]].values)}",
                remedy="use another model.config.model_type, give more times, lower "
                "data.series.horizon, or leave these series out",
            )
        return {
            name: it.last - self.model.calendar.step * self._held_back(len(it.values))
            for name, it in pasts.items()
        }

    def _held_back(self, times: int) -> int:
        return min(self.model.horizon, max(1, times // 3), times - self.model.least)

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows

        def is_last(one: Value) -> bool:
            return one.ordinal > self.starts[one.series]

        before = [one for one in self.past if not is_last(one)]
        return Learned(self._loss(before, [*filter(is_last, self.past)]), learning_rate_scale)

    def _loss(self, past: Sequence[Value], truth: Sequence[Value]) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            measured = errors(self.model, past, truth)["scaled_error"]
        # A series may be constant before its last times.
        finite = measured[np.isfinite(measured)]
        return float(finite.mean()) if len(finite) else 0.0

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        del state

    def learned_model(self) -> SeriesModel:
        return self.model


def repeating_dates(calendar: Calendar) -> list[str]:
    """Return the names of the numbers of a time that repeat at this frequency."""
    if calendar.kind == "number":
        return []
    if calendar.unit == "month":
        return ["month"] if calendar.step < 12 else []
    if calendar.unit == "business day":
        return ["month", "dayofweek"]
    if calendar.step >= DAY:
        return ["month", "week"] if calendar.step >= 7 * DAY else ["month", "dayofweek"]
    return ["dayofweek", "hour", *(["minute"] if calendar.step < DAY // 24 else [])]


def new_model(model_type: str, config: RunConfig, data: DataRecord) -> SeriesModel:
    """Return a model of statsforecast for the series of prepared data."""
    return SeriesModel(**described(model_type, config, data))


def described(model_type: str, config: RunConfig, data: DataRecord) -> dict[str, Any]:
    """Return what each model for the series of prepared data needs to know."""
    series, series_values = config.data.series, read_series(data)
    assert series.horizon is not None, "the configuration checks it"
    columns = {"series": series.column, "time": series.time, "target": config.data.target}
    return {
        "model_type": model_type,
        "calendar": series_values.calendar,
        "season": series_values.season,
        "horizon": series.horizon,
        "columns": columns,
        "covariates": series_values.covariates,
        "gaps": config.data.max_bad_share,
    }


STATSFORECAST: Final = LearnerTrainer(StatisticalLearner)
