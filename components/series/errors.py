"""How far forecasts are from what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from steadytrain.components.series.encoder import COVARIATES, NAME, TIME, Series
from steadytrain.components.series.model import (
    QUANTILES,
    Calendar,
    History,
    Known,
    SeriesModel,
    history,
    naive_scale,
    shown,
)
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tasks.encoding.base import COLUMNS
from steadytrain.components.tasks.scoring.table import read_batches

_COLUMNS: Final = (NAME, TIME, "label")


@dataclass(frozen=True)
class Value:
    """The value of a series at the ordinal of a time."""

    series: str
    ordinal: int
    value: float
    covariates: tuple[float, ...] = ()


def read_series(data: DataRecord) -> Series:
    """Return what the series of prepared data have in common."""
    return Series.model_validate_json(data.path(COLUMNS).read_text(encoding="utf-8"))


def read_values(data: DataRecord, calendar: Calendar, *sides: Side) -> list[Value]:
    """Return the values of sides."""
    columns = (*_COLUMNS, COVARIATES) if read_series(data).covariates else _COLUMNS
    result = list[Value]()
    for side in sides:
        for batch in read_batches(data, side, columns):
            result += values_in(batch, calendar)
    return result


def values_in(records: Any, calendar: Calendar) -> list[Value]:
    """Return the values of rows or of test records, in their order."""
    columns = [records.column(name).to_pylist() for name in _COLUMNS]
    known: list[Any] = [()] * len(columns[0])
    if COVARIATES in records.schema.names:
        known = records.column(COVARIATES).to_pylist()
    return [
        Value(name, calendar.ordinal(time), value, tuple(covariates))
        for name, time, value, covariates in zip(*columns, known, strict=True)
    ]


def histories_of(values: Sequence[Value], step: int) -> tuple[dict[str, History], Known]:
    """Return the history of each series, in the order of their names, and its covariates."""
    result, known = dict[str, dict[int, float]](), dict[str, dict[int, Sequence[float]]]()
    for one in values:
        result.setdefault(one.series, {})[one.ordinal] = one.value
        known.setdefault(one.series, {})[one.ordinal] = one.covariates
    pasts = {name: history([*it], [*it.values()], step) for name, it in sorted(result.items())}
    return pasts, known if any(one.covariates for one in values) else {}


def errors(model: SeriesModel, past: Sequence[Value], truth: Sequence[Value]) -> dict[str, Any]:
    """Forecast the times of some values, from values before them.

    Returns:
        `target`, `predicted`, and the columns of scores, as in `Scorer.score`: (values,).
        `scaled_error` is in mean errors of the seasonal naive forecast of the past (Hyndman and
        Koehler 2006), `symmetric_error` relative to half the sum of the two sizes, and `pinball`
        the mean over `QUANTILES`. `low` and `high` are the ends of the interval, and `ordinal` the
        ordinal of the time.

    Raises:
        DataError: a series has no past, or the model cannot be fitted to it.
    """
    step = model.calendar.step
    histories, _ = histories_of(past, step)
    _, known = histories_of([*past, *truth], step)
    last = dict[str, int]()
    for one in truth:
        last[one.series] = max(one.ordinal, last.get(one.series, one.ordinal))
    if unseen := last.keys() - histories:
        raise DataError(
            f"{shown(min(unseen))} has no value before those to forecast",
            remedy="give its history, or leave it out",
        )
    pasts = {name: histories[name] for name in sorted(last)}
    scales = {name: naive_scale(seen.values, model.season) for name, seen in pasts.items()}
    ahead = {name: (last[name] - seen.last) // step for name, seen in pasts.items()}
    try:
        forecasts = model.forecasts(pasts, ahead, known)
    except ValueError as error:
        raise DataError(
            str(error), remedy="use another model.config.model_type, or leave the series out"
        ) from error
    quantiles = {
        key: np.array(
            [
                forecasts[one.series][key][(one.ordinal - pasts[one.series].last) // step - 1]
                for one in truth
            ]
        )
        for key in QUANTILES
    }
    target, predicted = np.array([one.value for one in truth]), quantiles["prediction"]
    deviations = np.abs(predicted - target)
    sizes = np.abs(predicted) + np.abs(target)
    scale = np.array([scales[one.series] for one in truth])
    return {
        "target": target,
        "predicted": predicted,
        "squared_error": np.square(deviations),
        "absolute_error": deviations,
        "scaled_error": deviations / scale,
        "low": quantiles["quantile_0.1"],
        "high": quantiles["quantile_0.9"],
        "ordinal": np.array([one.ordinal for one in truth], np.float64),
        "symmetric_error": np.divide(
            2 * deviations, sizes, out=np.zeros_like(deviations), where=sizes > 0
        ),
        "pinball": np.mean(
            [
                np.maximum(
                    level * (target - quantiles[key]), (level - 1) * (target - quantiles[key])
                )
                for key, level in QUANTILES.items()
            ],
            axis=0,
        ),
    }
