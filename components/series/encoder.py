"""Read the records of time series, and divide them by time. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from steadytrain.components.series.model import Calendar, inferred, moment, shown
from steadytrain.components.shared.config import DataConfig
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import Side, TimeKey, time_key
from steadytrain.components.tasks.encoding.base import Content, EncodedRecord, EncodedRow, Fitted
from steadytrain.components.tasks.encoding.fields import Defect, name_of, number_of
from steadytrain.components.tasks.encoding.labeled_text import number_target
from steadytrain.components.tasks.encoding.leaks import ALLOW, FEW, function_of

NAME, TIME, COVARIATES = "series", "time", "covariates"
"""Columns of rows and of test records, next to `label`: the series and the time as text, and with
`data.series.covariates` their numbers."""
_SIDES: Final[tuple[Side, ...]] = ("train", "validation", "test")
_TIMES_TO_FIT: Final = 2
_MOST_FILLED: Final = 100_000_000
"""Absent times of all series that are filled, in memory, whatever share of gaps is allowed."""


class Series(BaseModel):
    """What the series of the data have in common.

    calendar: the settings of `model.Calendar`.
    frequency: how far apart their times are.
    season: the times after which a pattern repeats.
    count: of series.
    shortest, longest: times of a series, with those that are absent.
    gaps: times without a value, which are filled for the models.
    ended: series that end before the last time of the data.
    first, last: times of the data.
    covariates: the columns that are known of the future too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    calendar: dict[str, Any]
    frequency: str
    season: int
    count: int
    shortest: int
    longest: int
    gaps: int
    ended: int
    first: str
    last: str
    covariates: list[str] = []

    def remarks(self) -> Iterator[str]:
        """Yield what users should know."""
        season = f"a season of {self.season} times" if self.season > 1 else "no season"
        yield (
            f"the times of a series are {self.frequency} apart, with {season}; if that is wrong, "
            "correct the times, or set data.series.season"
        )
        if self.gaps:
            yield (
                f"{self.gaps:,} times within the series have no value; models get those between "
                "their neighbors on a line, and no score counts them"
            )
        if self.ended:
            yield (
                f"{self.ended:,} of {self.count:,} series end before {self.last}; each is tested "
                "on its own last times"
            )
        if self.calendar["kind"] == "zoned":
            yield "times have a time zone, so all of them are read and forecast in UTC"

    def card(self) -> dict[str, Any]:
        """Return the fields of the data card."""
        return {
            "facts": {
                "series": f"{self.count:,}",
                "times": f"{self.first} to {self.last}",
                "frequency": self.frequency,
                "season": str(self.season),
                "times of a series": f"{self.shortest:,} to {self.longest:,}",
                "times without a value": f"{self.gaps:,}",
            }
        }


@dataclass(frozen=True)
class SeriesEncoder:
    """Records with the value of a series at a time."""

    data: DataConfig

    packed = False
    labeled = False
    reads_numbers = True
    tokenizer = None

    @property
    def schema(self) -> pa.Schema:
        fields: dict[str, pa.DataType] = {"label": pa.float64()}
        if self.data.series.covariates:
            fields[COVARIATES] = pa.list_(pa.float64())
        return pa.schema({NAME: pa.string(), TIME: pa.string()} | fields)

    @property
    def horizon(self) -> int:
        """The number of times to forecast."""
        horizon = self.data.series.horizon
        assert horizon is not None, "the configuration checks it"
        return horizon

    def columns(self) -> Sequence[Sequence[str]]:
        series = self.data.series
        columns = *self.data.targets, series.time, series.column
        return [[*filter(None, columns), *series.covariates]]

    def read(self, row: Mapping[str, Any]) -> Content:
        series, target = self.data.series, self.data.target
        name = ""
        if series.column:
            name = name_of(row, series.column) or ""
            if not name.strip():
                raise Defect("missing_field", f"{series.column} is absent, null or empty")
        if row.get(series.time) in (None, ""):
            raise Defect("missing_field", f"{series.time} is absent, null or empty")
        try:
            time = moment(row[series.time]).text
        except (ValueError, OverflowError) as error:
            raise Defect("wrong_type", f"{series.time}: {error}") from error
        if row.get(str(target)) == "":
            raise Defect("missing_field", f"{target} is absent, null or empty")
        value = repr(number_of(row, str(target)))
        record: dict[str, Any] = {NAME: name, TIME: time}
        if series.covariates:
            record[COVARIATES] = [covariate_of(row, column) for column in series.covariates]
        text = json.dumps(record, ensure_ascii=False, sort_keys=True)
        # Without a column of series, each time counts on its own.
        return Content(text, value, prompt=name or None, identity=f"{value} {text}")

    def test_columns(self, records: pa.Table) -> Mapping[str, Any]:
        texts: list[Any] = records["content"].to_pylist()
        columns = [*map(json.loads, texts)]
        return {
            **{
                name: pa.array([one[name] for one in columns], pa.string()) for name in (NAME, TIME)
            },
            "label": records["label"].cast(pa.float64()),
            **(
                {COVARIATES: pa.array([one[COVARIATES] for one in columns], pa.list_(pa.float64()))}
                if self.data.series.covariates
                else {}
            ),
        }

    def row_encoder(self, fitted: Fitted) -> SeriesRows:
        del fitted
        return SeriesRows()

    def divide(self, texts: Sequence[str], labels: Sequence[str]) -> list[Side]:
        """Return the side of each record: the last times of each series are held out.

        Args:
            texts, labels: `Content.text` and `Content.label` of all records.

        Raises:
            DataError: the times are not regular, a series is too short, has two values at one time,
                has too many gaps, or has nothing to learn.
        """
        records = [json.loads(text) for text in texts]
        grid = _Grid.of([(one[NAME], one[TIME]) for one in records], [*map(float, labels)])
        season = self.data.series.season or grid.calendar.season
        known = dict[tuple[str, int], Any]()
        for ordinal, one in zip(grid.ordinals, records, strict=True):
            if known.setdefault(ordinal, one.get(COVARIATES)) != one.get(COVARIATES):
                raise DataError(
                    f"{shown(ordinal[0])} has two records at {grid.calendar.text(ordinal[1])}, "
                    f"which differ in {', '.join(self.data.series.covariates)}",
                    remedy="keep one of them, or name the column of the series in "
                    "data.series.column",
                )
        step, ends = grid.calendar.step, grid.checked(self.horizon, season, self.data.max_bad_share)
        ahead = ((ends[name] - ordinal) // step for name, ordinal in grid.ordinals)
        return [_SIDES[max(0, 2 - before // self.horizon)] for before in ahead]

    def time_key(self, text: str) -> TimeKey:
        return time_key(*moment(json.loads(text)[TIME]))

    def parts_in_time(self, records: pa.Table, folds: int) -> tuple[list[int], int]:
        """Return the part of each record, and the times of the shortest series in the first one.

        The last horizon of each series is the last part.

        Raises:
            DataError: a series has too few times for that many folds.
        """
        columns = (cast("list[Any]", records[name].to_pylist()) for name in (NAME, TIME, "label"))
        names, times, values = columns
        grid = _Grid.of([*zip(names, times, strict=True)], values)
        season = self.data.series.season or grid.calendar.season
        step, least = grid.calendar.step, (folds + 1) * self.horizon + season + _TIMES_TO_FIT
        ends = {name: max(several) for name, several in grid.series.items()}
        lengths = {name: (ends[name] - min(it)) // step + 1 for name, it in grid.series.items()}
        if short := [name for name, length in lengths.items() if length < least]:
            raise DataError(
                f"{len(short):,} of {len(ends):,} series are too short for {folds} folds of a "
                f"horizon of {self.horizon}, which need {least:,} times before the validation "
                f"side: {shown(short[0])} has {lengths[short[0]]:,}",
                remedy="lower cross_validation.folds or data.series.horizon, or leave these "
                "series out",
            )
        before = ((ends[name] - ordinal) // step // self.horizon for name, ordinal in grid.ordinals)
        parts = [max(0, folds + 1 - part) for part in before]
        learned = dict[str, dict[int, float]]()
        for (name, ordinal), value, part in zip(grid.ordinals, values, parts, strict=True):
            if part == 0:
                learned.setdefault(name, {})[ordinal] = value
        if constant := [
            name for name in ends if len({*learned.get(name, {}).values()}) < _TIMES_TO_FIT
        ]:
            raise DataError(
                f"{len(constant):,} of {len(ends):,} series have the same value at all times that "
                f"the first of {folds} folds learns from: {shown(constant[0])}",
                remedy="lower cross_validation.folds, or leave these series out",
            )
        return parts, min((max(it) - min(it)) // step + 1 for it in learned.values())

    def describe(self, sides: Mapping[Side, Iterable[pa.Table]]) -> Series:
        """Return what the series of all sides have in common.

        Raises:
            DataError: a covariate gives the target away.
        """
        pairs, values, known = list[tuple[str, str]](), list[float](), list[Any]()
        covariates = self.data.series.covariates
        for side, table in ((side, table) for side, tables in sides.items() for table in tables):
            names, times, numbers = (
                cast("list[Any]", table[name].to_pylist()) for name in (NAME, TIME, "label")
            )
            pairs += zip(names, times, strict=True)
            values += numbers
            learned = covariates and side == "train"
            known += table[COVARIATES].to_pylist() if learned else [None] * len(names)
        grid = _Grid.of(pairs, values)
        _refuse_leaks(
            [*zip(grid.ordinals, values, known, strict=True)], covariates, self.data.allow_leaks
        )
        calendar, series = grid.calendar, grid.series
        lengths = [
            (max(several) - min(several)) // calendar.step + 1 for several in series.values()
        ]
        ends = [max(several) for several in series.values()]
        return Series(
            calendar=calendar.settings(),
            frequency=calendar.frequency,
            season=self.data.series.season or calendar.season,
            count=len(series),
            shortest=min(lengths),
            longest=max(lengths),
            gaps=sum(lengths) - len(pairs),
            ended=sum(end < max(ends) for end in ends),
            first=calendar.text(min(min(several) for several in series.values())),
            last=calendar.text(max(ends)),
            covariates=covariates,
        )

    def brief(self, text: str) -> str:
        """Return what people see of a record."""
        stored = json.loads(text)
        return " ".join(filter(None, (stored[NAME], stored[TIME])))


def _refuse_leaks(
    records: Sequence[tuple[tuple[str, int], float, Any]],
    covariates: Sequence[str],
    allowed: Sequence[str],
) -> None:
    """Refuse covariates that give the target of the training side away.

    Args:
        records: series and ordinal, value, and covariates; None on other sides.

    Raises:
        DataError: there is one that is not allowed.
    """
    learned = sorted(record for record in records if record[2] is not None)
    if len(learned) < FEW:
        return
    names = np.array([name for (name, _), _, _ in learned])
    values = np.array([value for _, value, _ in learned])
    starts = np.flatnonzero(names[1:] != names[:-1]) + 1
    found = dict[str, str]()
    for index, column in enumerate(covariates):
        numbers = np.array([known[index] for *_, known in learned])
        steps = map(np.diff, np.split(numbers, starts))
        trend = all((each >= 0).all() or (each <= 0).all() for each in steps)
        if column not in allowed and (evidence := function_of(numbers, values, in_time=trend)):
            found[column] = evidence
    if found:
        told = "; ".join(f"{column!r}: {evidence}" for column, evidence in found.items())
        raise DataError(
            "data.series.covariates names columns that give the target away on the training side. "
            f"{told}",
            remedy=f"leave it out of data.series.covariates, or {ALLOW} all the same",
        )


def covariate_of(row: Mapping[str, Any], column: str) -> float:
    """Return a number; 1 or 0 for yes or no.

    Raises:
        Defect: it is absent, or something else.
    """
    value = row.get(column)
    if isinstance(value, bool):
        return float(value)
    try:
        return number_of(row, column)
    except Defect as defect:
        if not isinstance(value, str) or not value.strip():
            raise
        raise Defect(
            defect.reason,
            f"{defect.detail}; data.series.covariates are columns of numbers: give one of 0 and 1 "
            "for each category",
        ) from defect


@dataclass(frozen=True)
class SeriesRows:
    """Encodes values of series."""

    def encode(self, records: Sequence[Content]) -> list[EncodedRecord | Defect]:
        return [
            EncodedRecord(
                1,
                [
                    EncodedRow(
                        {**json.loads(record.text), "label": number_target(record)},
                        tokens=1,
                        targets=1,
                    )
                ],
            )
            for record in records
        ]


@dataclass(frozen=True)
class _Grid:
    """Records by the ordinal of their time.

    ordinals: the series and ordinal of each record.
    series: values by series and ordinal.
    """

    calendar: Calendar
    ordinals: list[tuple[str, int]]
    series: dict[str, dict[int, float]]

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]], values: Sequence[float]) -> _Grid:
        """Read series and times.

        Raises:
            DataError: the times are not regular, or a series has two values at one time.
        """
        times = dict[str, set[str]]()
        for name, time in pairs:
            times.setdefault(name, set()).add(time)
        try:
            calendar = inferred(times)
        except ValueError as error:
            raise DataError(
                str(error),
                remedy="give series with one frequency, and name the right column in "
                "data.series.time; if there are several series, name theirs in data.series.column",
            ) from error
        known = {time: calendar.ordinal(time) for several in times.values() for time in several}
        ordinals = [(name, known[time]) for name, time in pairs]
        series = dict[str, dict[int, float]]()
        for (name, ordinal), value in zip(ordinals, values, strict=True):
            if series.setdefault(name, {}).setdefault(ordinal, value) != value:
                both = sorted((series[name][ordinal], value))
                raise DataError(
                    f"{shown(name)} has two values at {calendar.text(ordinal)}: {both[0]:g} and "
                    f"{both[1]:g}",
                    remedy="keep one of them, or name the column of the series in "
                    "data.series.column",
                )
        return cls(calendar, ordinals, series)

    def checked(self, horizon: int, season: int, gaps: float) -> dict[str, int]:
        """Return the last ordinal of each series.

        Args:
            gaps: the share of the times of a series that may have no value.

        Raises:
            DataError: a series is too short, has more gaps, has nothing to learn, or ends where no
                date follows; or the gaps of all series are too many to fill.
        """
        least, step = 3 * horizon + season + _TIMES_TO_FIT, self.calendar.step
        ends = {name: max(several) for name, several in self.series.items()}
        short, broken, constant = list[str](), list[str](), list[str]()
        absent = dict[str, int]()
        for name, several in self.series.items():
            length = (ends[name] - min(several)) // step + 1
            absent[name] = length - len(several)
            seen = {
                ordinal: value
                for ordinal, value in several.items()
                if (ends[name] - ordinal) // step >= 2 * horizon
            }
            if length < least or len(seen) < _TIMES_TO_FIT:
                short.append(f"{shown(name)} has {length:,} times")
            elif absent[name] > gaps * length:
                broken.append(f"{absent[name]:,} of {length:,} times of {shown(name)}")
            elif np.ptp([*seen.values()]) == 0:
                constant.append(f"{shown(name)} is {next(iter(seen.values())):g}")
        count = f"{len(ends):,} series"
        if short:
            raise DataError(
                f"{len(short):,} of {count} are too short for a horizon of {horizon} and a season "
                f"of {season}, which need {least:,} times: {short[0]}",
                remedy="give more times, lower data.series.horizon or data.series.season, or leave "
                "these series out",
            )
        if broken:
            raise DataError(
                f"{len(broken):,} of {count} have more gaps than data.max_bad_share = {gaps:g} "
                f"allows: {broken[0]} have no value",
                remedy="give the absent values, or raise data.max_bad_share to fill gaps between "
                "their neighbors",
            )
        if (total := sum(absent.values())) > _MOST_FILLED:
            name = max(absent, key=absent.__getitem__)
            first, last = map(self.calendar.text, (min(self.series[name]), ends[name]))
            raise DataError(
                f"{total:,} times within the series have no value, and at most {_MOST_FILLED:,} "
                f"are filled: {shown(name)} lacks {absent[name]:,} from {first} to {last}",
                remedy="correct or leave out records with wrong times",
            )
        name = max(ends, key=ends.__getitem__)
        try:
            self.calendar.text(ends[name] + horizon * step)
        except (OverflowError, ValueError) as error:
            raise DataError(
                f"{shown(name)} ends so late that its next {horizon} times have no date: no year "
                "after 9999 has",
                remedy="correct or leave out records with wrong times",
            ) from error
        if constant:
            raise DataError(
                f"{len(constant):,} of {count} have the same value at all times to learn from, so "
                f"that no error can be scaled: {constant[0]}",
                remedy="leave these series out",
            )
        return ends
