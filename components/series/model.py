"""A model of time series, which this file alone can load: it is exported with the model.

It needs only NumPy, and what the model's class names in `packages`, for
`load(folder).rows(records)`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILE = "series.json"
TREES = "trees.txt"
"""File with the trees of LightGBM, of a model that has them."""
WEIGHTS = "model.safetensors"
"""File with the weights of a network, of a model that is one."""
_MEMBER = "member-{}"
"""Folder with a member of an ensemble."""
LEVEL = 80
"""Percent of the values that an interval of a forecast is meant to hold."""
QUANTILES = {"quantile_0.1": 0.1, "prediction": 0.5, "quantile_0.9": 0.9}
"""The quantiles of a forecast, by their names. The prediction counts as the median."""
FORECASTS = "steadytrain.forecasts"
"""In the metadata of a logged model that takes the history of series and returns their future."""
_ISO = re.compile(r"\d{4}-\d{2}(-\d{2}([T ]\d{2}:?\d{2}.*)?)?")
_BASIC = re.compile(r"(1[6-9]|2[0-3])\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])")
_WHOLE = re.compile(r"[+-]?\d{1,15}(\.0*)?")
_EPOCH = datetime(1970, 1, 1)
_MOSTLY = 0.9
"""Share of dates on one day of the month from which on the others are wrong."""
DAY = 86_400_000_000
"""In microseconds."""
_UNITS = {"week": 7 * DAY, "day": DAY, "hour": 3_600_000_000, "minute": 60_000_000}
_UNITS |= {"second": 1_000_000, "microsecond": 1}
_GAPS = 0.5
"""Share of the times between the first and the last that may have no value."""
_LEAST = {"auto_ets": 7, "auto_theta": 4}
"""Values that a model of statsforecast needs besides those of a season: its parameters and more."""
_SEASONS = {"1 business day": 5, "1 day": 7, "1 week": 52}
_DATE_FEATURES = {
    "year": lambda when: when.year,
    "quarter": lambda when: (when.month + 2) // 3,
    "month": lambda when: when.month,
    "week": lambda when: when.isocalendar().week,
    "day": lambda when: when.day,
    "dayofyear": lambda when: when.timetuple().tm_yday,
    "dayofweek": lambda when: when.weekday(),
    "hour": lambda when: when.hour,
    "minute": lambda when: when.minute,
}
"""Numbers of a time, by their names in pandas."""
DATE_FEATURES = tuple(_DATE_FEATURES)
_CYCLES = {
    "quarter": 4.0,
    "month": 12.0,
    "week": 52.18,
    "day": 30.44,
    "dayofyear": 365.25,
    "dayofweek": 7.0,
    "hour": 24.0,
    "minute": 60.0,
}
"""The period of each part of a time, in its own units."""


class Moment(NamedTuple):
    """A time that has been read.

    kind: "number", "date" or "zoned": a date with a time zone, which is in UTC here.
    """

    kind: str
    value: int | datetime

    @property
    def text(self) -> str:
        """The time in one form: equal times have the same."""
        if isinstance(self.value, int):
            return str(self.value)
        text = self.value.isoformat()
        return text + "Z" if self.kind == "zoned" else text.removesuffix("T00:00:00")


def moment(value: Any) -> Moment:
    """Return a time: a date or time in ISO 8601, or a whole number. 20240531 is a date.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = (value.isoformat() if isinstance(value, date) else str(value)).strip()
    if _BASIC.fullmatch(text):
        text = f"{text[:4]}-{text[4:6]}-{text[6:]}"
    if _WHOLE.fullmatch(text):
        return Moment("number", int(text.partition(".")[0]))
    if not _ISO.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is neither a date in ISO 8601 nor a whole number")
    time = datetime.fromisoformat(f"{text}-01" if len(text) == 7 else text)
    if time.tzinfo is None:
        return Moment("date", time)
    return Moment("zoned", time.astimezone(UTC).replace(tzinfo=None))


class Calendar:
    """The times that series have values at.

    A time has a ordinal, a whole number. Ordinals of a series are multiples of `step` apart.

    kind: of the times, as in `Moment`.
    unit: what a ordinal counts: "number", "microsecond", "business day" or "month".
    clock: microseconds since midnight of each time, and `day` its day of the month (0 is the last
        one), where the unit does not tell.
    """

    def __init__(self, kind: str, unit: str, step: int, clock: int = 0, day: int = 0) -> None:
        self.kind, self.unit, self.step, self.clock, self.day = kind, unit, step, clock, day

    @property
    def frequency(self) -> str:
        """How far apart two times are, such as `1 month`."""
        count, unit = self.step, self.unit
        if unit == "number":
            return str(count)
        if unit == "microsecond":
            unit, size = next(item for item in _UNITS.items() if count % item[1] == 0)
            count //= size
        return f"{count} {unit}{'s' * (count > 1)}"

    @property
    def season(self) -> int:
        """The number of times after which a pattern is likely to repeat."""
        if self.unit == "month":
            return max(1, 12 // self.step) if 12 % self.step == 0 else 1
        if self.unit == "microsecond" and self.step < DAY and DAY % self.step == 0:
            return DAY // self.step
        return _SEASONS.get(self.frequency, 1)

    def ordinal(self, value: Any) -> int:
        """Return the ordinal of a time.

        Raises:
            ValueError: it is no time, or not one of this calendar.
        """
        time = moment(value)
        if time.kind != self.kind:
            kinds = {"number": "whole numbers", "date": "dates", "zoned": "dates with a time zone"}
            raise ValueError(f"the time {time.text} is not among {kinds[self.kind]}")
        ordinal = _ordinal(time, self.unit)
        if self.text(ordinal) != time.text:
            raise ValueError(
                f"the time {time.text} is between two times that are {self.frequency} apart"
            )
        return ordinal

    def text(self, ordinal: int) -> str:
        """Return the time at a ordinal."""
        if self.unit == "number":
            return str(ordinal)
        if self.unit == "microsecond":
            time = _EPOCH + timedelta(microseconds=ordinal)
        elif self.unit == "business day":
            offset: Any = np.busday_offset
            time = datetime.fromisoformat(str(offset("1970-01-01", ordinal)))
        else:
            first = datetime(ordinal // 12, ordinal % 12 + 1, 1)
            after = datetime(first.year + first.month // 12, first.month % 12 + 1, 1)
            last = (after - timedelta(days=1)).day
            time = first.replace(day=self.day or last)
        if self.unit != "microsecond":
            time += timedelta(microseconds=self.clock)
        return Moment(self.kind, time).text

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return dict(vars(self))


def _ordinal(found: Moment, unit: str) -> int:
    when = found.value
    if isinstance(when, int):
        return when
    if unit == "month":
        return when.year * 12 + when.month - 1
    if unit == "business day":
        return int(np.busday_count("1970-01-01", when.date().isoformat()))
    return (when - _EPOCH) // timedelta(microseconds=1)


def inferred(series: Mapping[str, Iterable[str]]) -> Calendar:
    """Return the calendar of series, from their times.

    Raises:
        ValueError: their times are of several kinds, or not at regular distances.
    """
    moments = {name: sorted({moment(text) for text in times}) for name, times in series.items()}
    every = [time for several in moments.values() for time in several]
    first_of = {time.kind: time.text for time in every}
    if len(first_of) > 1:
        raise ValueError(
            f"times are of different kinds: {' and '.join(sorted(first_of.values()))}; write all "
            "of them in one form, with the time zone or without it"
        )
    (kind,) = first_of
    unit, clock, day = ("number", 0, 0) if kind == "number" else _unit(every, moments)
    ordinals = {
        name: np.array([_ordinal(time, unit) for time in several], dtype=np.int64)
        for name, several in moments.items()
    }
    return Calendar(kind, unit, _step(ordinals, Calendar(kind, unit, 1, clock, day)), clock, day)


def _unit(every: Sequence[Moment], series: Mapping[str, Sequence[Moment]]) -> tuple[str, int, int]:
    """Return the unit of dates, the time of day that all have, and the day of the month.

    Raises:
        ValueError: a few are on another day of the month.
    """
    dates = [*map(_date, every)]
    clocks = {(when - when.replace(hour=0, minute=0, second=0, microsecond=0)) for when in dates}
    if len(clocks) > 1:
        return "microsecond", 0, 0
    clock = clocks.pop() // timedelta(microseconds=1)
    days = {when.day for when in dates}
    ends = all((when + timedelta(days=1)).day == 1 for when in dates)
    several = len({(when.year, when.month) for when in dates}) > 1
    if several and (ends or (len(days) == 1 and min(days) <= 28)):
        return "month", clock, 0 if ends else days.pop()
    shared, count = Counter(when.day for when in dates).most_common(1)[0]
    if several and shared <= 28 and len(dates) > count >= _MOSTLY * len(dates):
        odd = next(time.text for time in every if _date(time).day != shared)
        raise ValueError(
            f"the times are not regular: nearly all are on day {shared} of a month, and {odd} is "
            "not"
        )
    if all(when.weekday() < 5 for when in dates):
        gaps = Counter(
            (after - before).days
            for times in series.values()
            for before, after in pairwise([_date(time) for time in times])
        )
        if gaps and gaps.most_common(1)[0][0] == 1 and gaps[3] > 0:
            return "business day", clock, 0
    return "microsecond", 0, 0


def _date(found: Moment) -> datetime:
    assert isinstance(found.value, datetime), "of a calendar of dates"
    return found.value


def _step(ordinals: Mapping[str, Any], calendar: Calendar) -> int:
    """Return how far the ordinals of each series are apart.

    Raises:
        ValueError: not all are multiples of one distance.
    """
    steps = dict[str, int]()
    for name, several in ordinals.items():
        if len(several) > 1:
            sizes, counts = np.unique(np.diff(several), return_counts=True)
            steps[name] = int(sizes[counts.argmax()])
    if not steps:
        raise ValueError("no series has two times")
    shared = Counter(steps.values()).most_common(1)[0][0]
    for name, step in steps.items():
        if step != shared:
            distances = [
                Calendar(calendar.kind, calendar.unit, size).frequency for size in (step, shared)
            ]
            raise ValueError(
                f"the frequencies are mixed: the times of {shown(name)} are mostly {distances[0]} "
                f"apart, and those of other series {distances[1]}"
            )
        gaps = np.diff(ordinals[name])
        if (wrong := np.flatnonzero(gaps % shared)).size:
            before, after = ordinals[name][wrong[0]], ordinals[name][wrong[0] + 1]
            frequency = Calendar(calendar.kind, calendar.unit, shared).frequency
            raise ValueError(
                f"the times are not regular: {shown(name)} has {calendar.text(int(before))} and "
                f"then {calendar.text(int(after))}, and most of its times are {frequency} "
                "apart"
            )
    return shared


def shown(name: str) -> str:
    """Return how messages name a series."""
    return f"the series {name[:80]!r}" if name else "the series"


class History(NamedTuple):
    """The values of a series, one for each time.

    last: the ordinal of the last one.
    filled: how many were absent, and are between their neighbors now.
    """

    values: Any
    last: int
    filled: int


def history(ordinals: Sequence[int], values: Sequence[float], step: int) -> History:
    """Return the values in the order of their times. Gaps are filled on a line."""
    order = np.argsort(ordinals)
    there, known = np.array(ordinals)[order], np.array(values, dtype=np.float64)[order]
    index = (there - there[0]) // step
    whole = np.arange(index[-1] + 1)
    return History(np.interp(whole, index, known), int(there[-1]), len(whole) - len(index))


def naive_scale(values: Any, season: int) -> float:
    """Return the mean error of forecasting the value of a season before, which MASE divides by.

    If a series repeats itself exactly, that of forecasting the value before.
    """
    for lag in (season, 1):
        if len(values) > lag and (error := float(np.abs(values[lag:] - values[:-lag]).mean())) > 0:
            return error
    return 0.0


Forecast = Mapping[str, Any]
"""By name of `QUANTILES`: (times,)."""
Known = Mapping[str, Mapping[int, Sequence[float]]]
"""The covariates of series, of the past and of the future, by ordinal."""


class SeriesModel:
    """Forecasts series from their history by a model of statsforecast, each on its own.

    model_type: its name in `model.config`.
    columns: of the series (None if there is one), the time and the value.
    covariates: columns of numbers that are known of the future too.
    gaps: share of the times between the first and the last of a history that may have no value.
    packages: what it needs besides NumPy.
    """

    packages: tuple[str, ...] = ("statsforecast",)

    def __init__(
        self,
        model_type: str,
        calendar: Mapping[str, Any],
        season: int,
        horizon: int,
        columns: Mapping[str, str | None],
        covariates: Sequence[str] = (),
        gaps: float = _GAPS,
    ) -> None:
        self.model_type, self.calendar = model_type, Calendar(**calendar)
        self.season, self.horizon, self.columns = season, horizon, dict(columns)
        self.covariates, self.gaps = [*covariates], max(gaps, _GAPS)

    @property
    def least(self) -> int:
        """The number of times that a history needs."""
        return max(2, self.season, _LEAST.get(self.model_type, 0))

    def forecasts(
        self, pasts: Mapping[str, History], ahead: Mapping[str, int], known: Known
    ) -> dict[str, Forecast]:
        """Return the forecasts of series for the times after their last ones.

        Args:
            ahead: number of times, by series.

        Raises:
            ValueError: the model cannot be fitted to a series.
        """
        del known
        return {name: self.forecast(name, past, ahead[name]) for name, past in pasts.items()}

    def forecast(self, name: str, past: History, times: int) -> Forecast:
        """Return the forecast of a series for the times after its last one.

        Raises:
            ValueError: the model cannot be fitted to it.
        """
        from statsforecast import models

        kinds = {
            "seasonal_naive": models.SeasonalNaive,
            "auto_ets": models.AutoETS,
            "auto_arima": models.AutoARIMA,
            "auto_theta": models.AutoTheta,
        }
        try:
            model = kinds[self.model_type](season_length=self.season)
            outcome = model.forecast(past.values, times, level=[LEVEL])
        except Exception as error:
            raise ValueError(
                f"{self.model_type} cannot be fitted to {shown(name)}, which has "
                f"{len(past.values)} values: {type(error).__name__}: {error}"
            ) from error
        names = {"quantile_0.1": f"lo-{LEVEL}", "prediction": "mean", "quantile_0.9": f"hi-{LEVEL}"}
        result = {key: np.asarray(outcome[source], np.float64) for key, source in names.items()}
        for values in result.values():
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{self.model_type} forecasts no finite number for {shown(name)}, which has "
                    f"{len(past.values)} values"
                )
        return result

    @property
    def names(self) -> list[str]:
        """The names of what `rows` returns of each time."""
        keys = [self.columns["series"], self.columns["time"]]
        return [*filter(None, keys), *sorted(QUANTILES)]

    def rows(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the next `horizon` times of each series in the records, with their forecasts.

        Args:
            records: the history: the values of each time, in any order. With covariates, also the
                `horizon` times after it, without a value.

        Raises:
            ValueError: a column is absent, a value is not a number, two are of one time, or a
                covariate is unknown.
        """
        pasts, known = self._read(records)
        if self.covariates:
            for name, past in pasts.items():
                self._check_known(name, past, known[name])
        forecasts = self.forecasts(pasts, dict.fromkeys(pasts, self.horizon), known)
        return [
            row for name, past in pasts.items() for row in self._rows(name, past, forecasts[name])
        ]

    def filled(self, records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return how many times without a value `rows` fills on a line, by series with such times.

        Raises:
            ValueError: `rows` cannot forecast from the records.
        """
        pasts, _ = self._read(records)
        return {name: past.filled for name, past in pasts.items() if past.filled}

    def _read(
        self, records: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, History], dict[str, dict[int, Sequence[float]]]]:
        """Return the history of each series, and its covariates by ordinal."""
        series, time, target = (self.columns[name] for name in ("series", "time", "target"))
        histories = dict[str, dict[int, float]]()
        known = dict[str, dict[int, Sequence[float]]]()
        optional = [target] if self.covariates else []
        for number, record in enumerate(records):
            for column in filter(None, (series, time, target, *self.covariates)):
                if record.get(column) is None and column not in optional:
                    raise ValueError(f"record {number} has no {column!r}")
            name = _name(record[series]) if series else ""
            ordinal = self.calendar.ordinal(record[str(time)])
            given = [_number(record, column, number) for column in self.covariates]
            if known.setdefault(name, {}).setdefault(ordinal, given) != given:
                raise ValueError(
                    f"{shown(name)} has two records of {', '.join(self.covariates)} at "
                    f"{self.calendar.text(ordinal)}"
                )
            if record.get(str(target)) is None:
                continue
            value = _number(record, str(target), number)
            if histories.setdefault(name, {}).setdefault(ordinal, value) != value:
                raise ValueError(
                    f"{shown(name)} has two values at {self.calendar.text(ordinal)}: "
                    f"{histories[name][ordinal]:g} and {value:g}"
                )
        if alone := known.keys() - histories:
            raise ValueError(f"{shown(min(alone))} has no {target!r} at any time")
        return {name: self._past(name, values) for name, values in sorted(histories.items())}, known

    def _past(self, name: str, values: Mapping[int, float]) -> History:
        ordinals, step = [*values], self.calendar.step
        if any((ordinal - ordinals[0]) % step for ordinal in ordinals):
            raise ValueError(f"the times of {shown(name)} are not {self.calendar.frequency} apart")
        between = (max(ordinals) - min(ordinals)) // step - 1
        absent = between - len(ordinals) + 2
        if absent > 0 and absent > self.gaps * between:
            first, last = (self.calendar.text(pick(ordinals)) for pick in (min, max))
            raise ValueError(
                f"{absent:,} of the {between:,} times between {first} and {last} have no value in "
                f"{shown(name)}, whose times are {self.calendar.frequency} apart"
            )
        past = history(ordinals, [*values.values()], step)
        if len(past.values) < self.least:
            raise ValueError(
                f"{shown(name)} has {len(past.values)} values, and the model needs at least "
                f"{self.least}"
            )
        return past

    def _check_known(self, name: str, past: History, known: Mapping[int, Sequence[float]]) -> None:
        for ahead in range(self.horizon):
            ordinal = past.last + self.calendar.step * (ahead + 1)
            if ordinal not in known:
                raise ValueError(
                    f"{shown(name)} has no {', '.join(self.covariates)} at "
                    f"{self.calendar.text(ordinal)}; give a record without "
                    f"{self.columns['target']!r} for each of the {self.horizon} times after its "
                    f"last value"
                )

    def _rows(self, name: str, past: History, forecast: Forecast) -> list[dict[str, Any]]:
        named = {self.columns["series"]: name} if self.columns["series"] else {}
        return [
            {
                **{str(column): text for column, text in named.items()},
                str(self.columns["time"]): self.calendar.text(
                    past.last + self.calendar.step * (ahead + 1)
                ),
                **{key: float(forecast[key][ahead]) for key in sorted(QUANTILES)},
            }
            for ahead in range(self.horizon)
        ]

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor that JSON holds."""
        return {**vars(self), "calendar": self.calendar.settings()}

    def save(self, folder: Path) -> None:
        """Write what `load` reads."""
        (folder / FILE).write_text(json.dumps(self.settings(), indent=1), encoding="utf-8")


class MeasuredModel(SeriesModel):
    """Forecasts with an interval that is as wide as the errors of held-out forecasts were.

    widths: half the width of the interval of each time ahead, in errors of the seasonal naive
        forecast of the history.
    """

    def __init__(self, *args: Any, widths: Sequence[float] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.widths = [*widths]

    def with_interval(self, past: History, point: Any) -> Forecast:
        """Return the forecast of a series with its interval.

        Args:
            point: (times,).
        """
        times, last = len(point), self.widths[-1] if self.widths else math.nan
        widths = np.array([*self.widths[:times]] + [last] * times)[:times]
        half_widths = widths * naive_scale(past.values, self.season)
        return {
            "quantile_0.1": point - half_widths,
            "prediction": point,
            "quantile_0.9": point + half_widths,
        }


class EnsembleModel(MeasuredModel):
    """Forecasts the weighted mean of what its members forecast.

    weights: of the members; they add up to 1.
    """

    def __init__(
        self,
        *args: Any,
        weights: Sequence[float],
        members: Sequence[SeriesModel],
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.weights, self.members = [*weights], [*members]
        self.packages = tuple(dict.fromkeys(it for one in members for it in one.packages))

    @property
    def least(self) -> int:
        return max(member.least for member in self.members)

    def forecasts(
        self, pasts: Mapping[str, History], ahead: Mapping[str, int], known: Known
    ) -> dict[str, Forecast]:
        result = [member.forecasts(pasts, ahead, known) for member in self.members]
        points = {name: [one[name]["prediction"] for one in result] for name in pasts}
        return {
            name: self.with_interval(past, np.average(points[name], axis=0, weights=self.weights))
            for name, past in pasts.items()
        }

    def settings(self) -> dict[str, Any]:
        own = ("members", "packages")
        return {name: value for name, value in super().settings().items() if name not in own}

    def save(self, folder: Path) -> None:
        super().save(folder)
        for index, member in enumerate(self.members):
            (folder / _MEMBER.format(index)).mkdir()
            member.save(folder / _MEMBER.format(index))


class TreesModel(MeasuredModel):
    """Forecasts all series by the same trees of LightGBM, one time after the other.

    The trees learn from the features that mlforecast makes of a history whose differences have been
    scaled, from numbers of the time, and from the covariates.

    features: `lags`; `windows` of rolling means and standard deviations; `dates`, names of
        `DATE_FEATURES`; `differences`.
    trees: in the text form of LightGBM.
    """

    packages = ("lightgbm", "mlforecast")

    def __init__(
        self,
        *args: Any,
        features: Mapping[str, Sequence[Any]],
        trees: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.features, self.trees = dict(features), trees

    @property
    def least(self) -> int:
        # One difference to scale, and one more.
        differences: int = sum(self.features["differences"])
        return max(2, self.season, differences + 2)

    def matrix(self, pasts: Mapping[str, History], known: Known) -> tuple[Any, Any, Any]:
        """Return mlforecast's forecaster, the features of histories, and the scaled differences.

        Returns:
            mlforecast.MLForecast; (values, features); (values,).
        """
        from mlforecast import MLForecast
        from mlforecast.lag_transforms import RollingMean, RollingStd
        from mlforecast.target_transforms import Differences, LocalStandardScaler

        given = self.features
        rolling = [
            kind(size, min_samples=least)
            for size in given["windows"]
            for kind, least in ((RollingMean, 1), (RollingStd, 2))
        ]
        differences = [Differences([*given["differences"]])] if given["differences"] else []
        made = MLForecast(
            models={},
            freq=1,
            lags=[*given["lags"]],
            lag_transforms={1: rolling} if rolling else None,
            target_transforms=[*differences, LocalStandardScaler()],
            num_threads=1,
        )
        step, starts = self.calendar.step, {}
        for name, past in pasts.items():
            starts[name] = past.last - step * (len(past.values) - 1)
        frame = self._frame(starts, {name: len(past.values) for name, past in pasts.items()}, known)
        frame["y"] = np.concatenate([past.values for past in pasts.values()])
        result = made.preprocess(frame, static_features=[], dropna=False)
        inputs = result.drop(columns=["unique_id", "ds", "y"]).to_numpy(np.float64)
        return made, inputs, result["y"].to_numpy(np.float64)

    def _frame(self, starts: Mapping[str, int], counts: Mapping[str, int], known: Known) -> Any:
        """Return the times of series from their first ordinals on, with what is known of them.

        Series are numbered in their order, and their times from 0 on: histories have gaps in
        neither.
        """
        import pandas as pd

        step, unknown = self.calendar.step, [math.nan] * len(self.covariates)
        ordinals = [
            (number, ordinal)
            for number, (name, start) in enumerate(starts.items())
            for ordinal in range(start, start + step * counts[name], step)
        ]
        names = [*starts]
        frame = pd.DataFrame(ordinals, columns=["unique_id", "ds"])
        distinct = frame["ds"].unique()
        moments = [moment(self.calendar.text(int(ordinal))).value for ordinal in distinct]
        for feature in self.features["dates"]:
            read = _DATE_FEATURES[feature]
            covariates = dict(zip(distinct, map(read, moments), strict=True))
            frame[feature] = frame["ds"].map(covariates).astype(float)
        rows = [known.get(names[number], {}).get(ordinal, unknown) for number, ordinal in ordinals]
        for index, column in enumerate(self.covariates):
            frame[f"covariate {column}"] = [row[index] for row in rows]
        frame["ds"] //= step
        return frame

    def forecasts(
        self, pasts: Mapping[str, History], ahead: Mapping[str, int], known: Known
    ) -> dict[str, Forecast]:
        import lightgbm

        made, _, _ = self.matrix(pasts, known)
        made.models_ = {"trees": _Trees(lightgbm.Booster(model_str=self.trees))}
        step, most = self.calendar.step, max(ahead.values())
        starts = {name: past.last + step for name, past in pasts.items()}
        frame = self._frame(starts, dict.fromkeys(pasts, most), known)
        future = frame if len(frame.columns) > 2 else None
        points = made.predict(most, X_df=future)["trees"].to_numpy(np.float64)
        return {
            name: self.with_interval(past, values[: ahead[name]])
            for (name, past), values in zip(pasts.items(), points.reshape(-1, most), strict=True)
        }

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if name != "trees"}

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / TREES).write_text(self.trees, encoding="utf-8")


class _Trees:
    """Trees of LightGBM as mlforecast takes a model."""

    def __init__(self, booster: Any) -> None:
        self.booster = booster

    def predict(self, features: Any) -> Any:
        return self.booster.predict(np.asarray(features, np.float64), num_threads=1)


class Window(NamedTuple):
    """What a network reads to forecast the times after a history.

    inputs: (features,), float32.
    base: (horizon,): the forecast that the network corrects, the last season once more.
    center, scale: mean and standard deviation of the history, which the base and the network's
        outputs are relative to.
    """

    inputs: Any
    base: Any
    center: float
    scale: float


class NetworkModel(SeriesModel):
    """Forecasts all times ahead at once by a network of residual blocks.

    It reads the last values, scaled by their own mean and deviation, and for each of their times
    and each time ahead the numbers of the time, on circles, and the covariates. It adds
    quantiles to the seasonal naive forecast.

    context: number of last values that it reads.
    dates: names of `DATE_FEATURES` that repeat.
    center, spread: of each covariate on the training side.
    weights: arrays by name, of layers `first`, `block0.up`, `block0.down` ... and `last`.
    """

    packages = ("safetensors",)

    def __init__(
        self,
        *args: Any,
        context: int,
        dates: Sequence[str],
        center: Sequence[float] = (),
        spread: Sequence[float] = (),
        weights: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.context, self.dates, self.weights = context, [*dates], dict(weights or {})
        self.center, self.spread = [*center], [*spread]

    @property
    def size(self) -> int:
        """The number of inputs."""
        known = 2 * len(self.dates) + len(self.covariates)
        return 2 * self.context + (self.context + self.horizon) * known

    def known_inputs(self, ordinals: Sequence[int], known: Mapping[int, Sequence[float]]) -> Any:
        """Return what is known of times: (times, features). An unknown covariate is its mean."""
        columns = list[Any]()
        if self.dates:
            moments = [moment(self.calendar.text(ordinal)).value for ordinal in ordinals]
            for name in self.dates:
                turn = [2 * math.pi * _DATE_FEATURES[name](one) / _CYCLES[name] for one in moments]
                columns += [np.sin(turn), np.cos(turn)]
        if self.covariates:
            unknown = [math.nan] * len(self.covariates)
            rows = np.array([known.get(ordinal, unknown) for ordinal in ordinals], np.float64)
            columns += [*np.nan_to_num((rows - self.center) / self.spread, nan=0.0).T]
        return np.stack(columns, axis=1) if columns else np.zeros((len(ordinals), 0))

    def window(self, values: Any, known: Any) -> Window:
        """Return what the network reads.

        Args:
            values: the history, at least one: (times,).
            known: `known_inputs` of the last `context` times and the next `horizon` ones.
        """
        seen = values[-self.context :]
        center, scale = float(seen.mean()), float(seen.std())
        if scale <= 1e-9 * max(1.0, abs(center)):
            scale = max(1.0, abs(center))
        padded, there = np.zeros(self.context), np.zeros(self.context)
        padded[-len(seen) :], there[-len(seen) :] = (seen - center) / scale, 1.0
        turn = self.season if self.season <= len(seen) else 1
        base = padded[-turn:][np.arange(self.horizon) % turn]
        inputs = np.concatenate([padded, there, known.ravel()]).astype(np.float32)
        return Window(inputs, base.astype(np.float32), center, scale)

    def outputs(self, inputs: Any) -> Any:
        """Return what the network adds to the base: (windows, horizon, quantiles)."""
        weights = self.weights

        def layer(name: str, given: Any) -> Any:
            return given @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        hidden, block = np.maximum(layer("first", inputs), 0), 0
        while f"blocks.{block}.up.weight" in weights:
            inner = np.maximum(layer(f"blocks.{block}.up", hidden), 0)
            hidden, block = hidden + layer(f"blocks.{block}.down", inner), block + 1
        return layer("last", hidden).reshape(len(inputs), self.horizon, len(QUANTILES))

    def forecasts(
        self, pasts: Mapping[str, History], ahead: Mapping[str, int], known: Known
    ) -> dict[str, Forecast]:
        values = {name: past.values for name, past in pasts.items()}
        result: dict[str, list[Any]] = {name: [] for name in pasts}
        # Beyond the horizon, as after gaps, what has been forecast counts as history.
        for turn in range(math.ceil(max(ahead.values(), default=0) / self.horizon)):
            for name, past in pasts.items():
                result[name].append(self._ahead(values[name], past.last, turn, known.get(name, {})))
                values[name] = np.concatenate([values[name], result[name][-1][:, 1]])
        return {
            name: dict(zip(QUANTILES, np.concatenate(result[name])[: ahead[name]].T, strict=True))
            for name in pasts
        }

    def _ahead(
        self, values: Any, last: int, turn: int, known: Mapping[int, Sequence[float]]
    ) -> Any:
        """Return the quantiles of the next `horizon` times: (times, quantiles)."""
        step = self.calendar.step
        now = last + step * self.horizon * turn
        ordinals = range(now - step * (self.context - 1), now + step * self.horizon + 1, step)
        window = self.window(values, self.known_inputs(ordinals, known))
        shifts = self.outputs(window.inputs[None].astype(np.float64))[0]
        # Quantiles that a network learns one by one may cross.
        quantiles = np.sort(window.base[:, None] + shifts, axis=1)
        return window.center + window.scale * quantiles

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if name != "weights"}

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        super().save(folder)
        save_file(dict(self.weights), folder / WEIGHTS)


def _name(value: Any) -> str:
    """Return the name of a series, which is a text or a whole number."""
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        # Data frames turn the whole numbers of a column with gaps into fractions.
        value = int(value)
    return str(value)


def _number(record: Mapping[str, Any], column: str, number: int) -> float:
    """Return a finite number of a record.

    Raises:
        ValueError: it is none.
    """
    value = float(record[column])
    if not math.isfinite(value):
        raise ValueError(f"{column!r} of record {number} is {value}")
    return value


def load(folder: Path) -> SeriesModel:
    """Load a model.

    Raises:
        OSError, ValueError, KeyError, TypeError: it cannot be read.
    """
    settings = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if "weights" in settings:
        ordinals = range(len(settings["weights"]))
        members = [load(folder / _MEMBER.format(index)) for index in ordinals]
        return EnsembleModel(**settings, members=members)
    if (folder / TREES).is_file():
        return TreesModel(**settings, trees=(folder / TREES).read_text(encoding="utf-8"))
    if (folder / WEIGHTS).is_file():
        from safetensors.numpy import load_file

        return NetworkModel(**settings, weights=load_file(folder / WEIGHTS))
    return SeriesModel(**settings)
