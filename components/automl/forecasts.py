"""The forecasts of a search's winner on held-out folds, as figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa

from steadytrain.components.pages.charts import WIDE, Figure, Series, nice_ticks, plot
from steadytrain.components.series.encoder import NAME
from steadytrain.components.series.model import LEVEL
from steadytrain.components.shared.quantities import number

_SERIES: Final = 4
"""Series that are shown."""
_LABELS: Final = 6
_DOTS: Final = 150
"""Times up to which each has a dot."""


class _Time(NamedTuple):
    """A time that a fold forecasts, as its columns are named in the scores."""

    ordinal: float
    fold: int
    time: str
    target: float
    predicted: float
    low: float
    high: float

    @property
    def tooltip(self) -> str:
        """What a page shows when the pointer is on it."""
        return (
            f"{self.time}: {number(self.target)}, forecast {number(self.predicted)} "
            f"({number(self.low)} to {number(self.high)})"
        )


def forecast_figures(scores: pa.Table | None) -> Iterator[Figure]:
    """Yield the forecasts of the first series, with their intervals and the truth.

    Args:
        scores: see `Board.forecasts`.
    """
    if scores is None:
        return
    names: list[Any] = scores[NAME].to_pylist()
    columns: list[list[Any]] = [scores[name].to_pylist() for name in _Time._fields]
    series = dict[str, list[_Time]]()
    for name, *values in zip(names, *columns, strict=True):
        series.setdefault(name, []).append(_Time(*values))
    ordered = [sorted(series[name]) for name in sorted(series)]
    # At gaps, times are further apart.
    gaps = [after.ordinal - one.ordinal for times in ordered for one, after in pairwise(times)]
    step = min((gap for gap in gaps if gap > 0), default=1.0)
    for name, times in [*zip(sorted(series), ordered, strict=True)][:_SERIES]:
        yield _figure(name, times, step, len(series))


def _figure(name: str, times: Sequence[_Time], step: float, series: int) -> Figure:
    title = f"Forecasts of {name[:40]}" if name else "Forecasts"
    folds = _segments(times, lambda one, after: one.fold != after.fold)
    several = len(folds) > 1

    def is_gap(one: _Time, after: _Time) -> bool:
        return after.ordinal - one.ordinal > 1.5 * step

    truth = _segments(times, is_gap)
    segments = [segment for fold in folds for segment in _segments(fold, is_gap)]
    first, last = times[0].ordinal, times[-1].ordinal
    pad = max((last - first) * 0.04, step * 0.6)
    values = [value for one in times for value in one[3:] if math.isfinite(value)]
    chart = plot(
        title,
        f"{title} on held-out folds, with the truth, from {times[0].time} to {times[-1].time}",
        [
            *map(_interval, segments),
            *map(_forecast, segments),
            *(_truth(it, len(times)) for it in truth),
        ],
        axis="time (UTC)" if times[0].time.endswith("Z") else "time",
        x=(first - pad, last + pad),
        labels=_labels(times),
        ticks=nice_ticks(min(values), max(values)),
        marks=[(fold[0].ordinal - step / 2, f"forecast before {fold[0].time}") for fold in folds],
        width=WIDE,
    )
    begin = "Each fold forecasts" if several else "The fold forecasts"
    shown = f" These are the first {_SERIES} of {series:,} series." if series > _SERIES else ""
    return Figure(
        title,
        chart,
        [f"forecast with its {LEVEL} % interval", "truth"],
        f"{begin} a horizon from what came before it, where the dashed line is. Where a time has "
        f"no value, lines are broken.{shown}",
    )


def _segments(
    times: Sequence[_Time], is_break: Callable[[_Time, _Time], bool]
) -> list[Sequence[_Time]]:
    """Return the times that follow each other."""
    ends = [n for n, pair in enumerate(pairwise(times), 1) if is_break(*pair)]
    return [times[start:end] for start, end in pairwise([0, *ends, len(times)])]


def _interval(segment: Sequence[_Time]) -> Series:
    known = [one for one in segment if math.isfinite(one.low) and math.isfinite(one.high)]
    low, high = [(it.ordinal, it.low) for it in known], [(it.ordinal, it.high) for it in known]
    return Series("band c0", [*low, *reversed(high)])


def _forecast(segment: Sequence[_Time]) -> Series:
    points = [(one.ordinal, one.predicted) for one in segment]
    # A line through one point cannot be seen.
    alone = [(points[0], segment[0].tooltip)] if len(segment) == 1 else []
    return Series("line c0", points, dots=alone)


def _truth(segment: Sequence[_Time], times: int) -> Series:
    points = [(one.ordinal, one.target) for one in segment]
    dots = zip(points, [one.tooltip for one in segment], strict=True)
    return Series("line c1", points, dots=[*dots] if times <= _DOTS or len(segment) == 1 else [])


def _labels(times: Sequence[_Time]) -> list[tuple[float, str]]:
    """Return the dates below the axis: some times, without what all of them share."""
    texts = [one.time for one in times]
    months = all(text.endswith("-01") for text in texts)
    count = min(_LABELS, len(times))
    chosen = sorted({round(n * (len(times) - 1) / max(1, count - 1)) for n in range(count)})
    return [
        (
            times[n].ordinal,
            texts[n][:-3]
            if months
            else texts[n].removesuffix("Z").removesuffix(":00").replace("T", " "),
        )
        for n in chosen
    ]
