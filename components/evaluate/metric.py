"""Per-example scores of a model as arrays, and the interface of a metric: a number from them.

A package adds a metric with an entry point in the group `steadytrain.metrics`. The entry point
names a `MeanMetric`, a `SampleMetric`, or an object with the methods of `Metric`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa

from steadytrain.components.evaluate.bootstrap import (
    FloatArray,
    IntArray,
    Resampling,
    replicate,
    units_of,
)
from steadytrain.components.evaluate.classes import Classes, LabelSets
from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.records import Interval

_KNOWN: Final = {
    *("id", "group", "slice", "loss", "targets", "bytes"),
    *("label", "prediction", "probabilities", "part"),
    *("labels", "predictions", "thresholds"),
}


@dataclass(frozen=True)
class Scores:
    """The result of `Scorer.score`, as arrays with one value per example.

    loss: nats, summed over the example's targets.
    bytes: size of the scored text.
    classes: None unless each example has one class.
    sets: None unless each example has any number of labels.
    columns: all other numeric columns by name, for metrics of other packages.
    """

    id: list[str]
    loss: FloatArray
    targets: FloatArray
    bytes: FloatArray
    units: IntArray
    slices: list[str | None]
    classes: Classes | None = None
    sets: LabelSets | None = None
    columns: Mapping[str, FloatArray] = field(default_factory=dict)

    @classmethod
    def of(cls, table: pa.Table) -> Scores:
        """Convert a table with the columns of `Scorer.score`.

        Raises:
            BadInput: a number of targets or bytes is negative.
        """

        def numbers(name: str) -> FloatArray:
            return np.asarray(table.column(name).to_numpy(), dtype=np.float64)

        for name in ("targets", "bytes"):
            if (numbers(name) < 0).any():
                raise BadInput(
                    f"the task's score() gives negative {name}",
                    remedy="count the targets and the bytes of each record, 0 where there are none",
                )
        return cls(
            id=[str(item) for item in table.column("id").to_pylist()],
            loss=numbers("loss"),
            targets=numbers("targets"),
            bytes=numbers("bytes"),
            units=units_of(table.column("group").to_pylist()),
            slices=table.column("slice").to_pylist(),
            classes=_classes(table) if "label" in table.column_names else None,
            sets=LabelSets.of(table) if "labels" in table.column_names else None,
            columns={
                item.name: numbers(item.name)
                for item in table.schema
                if item.name not in _KNOWN and _is_number(item.type)
            },
        )

    def only(self, rows: IntArray) -> Scores:
        """Return the scores of some examples."""
        return Scores(
            id=[self.id[row] for row in rows],
            loss=self.loss[rows],
            targets=self.targets[rows],
            bytes=self.bytes[rows],
            units=self.units[rows],
            slices=[self.slices[row] for row in rows],
            classes=self.classes and self.classes.only(rows),
            sets=self.sets and self.sets.only(rows),
            columns={name: values[rows] for name, values in self.columns.items()},
        )

    def by_slice(self) -> dict[str, IntArray]:
        """Return the row numbers of each slice value, sorted by value."""
        values = sorted({value for value in self.slices if value is not None})
        column = np.array([value or "" for value in self.slices], dtype=object)
        defined = np.array([value is not None for value in self.slices])
        return {value: np.flatnonzero(defined & (column == value)) for value in values}

    @property
    def counted_units(self) -> IntArray:
        """The unit of each example, (examples,), and -1 if it has nothing to predict."""
        return np.where((self.targets == 0) & (self.loss == 0), -1, self.units)

    @property
    def metric(self) -> str:
        """The default metric to compare models by, if the gate doesn't name one."""
        if self.classes is not None:
            return "accuracy"
        if "scaled_error" in self.columns:
            return "mase"
        if "squared_error" in self.columns:
            return "mse"
        if self.sets is not None:
            return "micro_f1"
        return "bits_per_byte" if self.bytes.sum() > 0 else "loss"


def _classes(table: pa.Table) -> Classes:
    probabilities: Any = table.column("probabilities").combine_chunks()
    return Classes(
        label=np.asarray(table.column("label").to_numpy(), dtype=np.int64),
        prediction=np.asarray(table.column("prediction").to_numpy(), dtype=np.int64),
        probabilities=np.asarray(probabilities.flatten(), dtype=np.float64).reshape(
            table.num_rows, -1
        ),
        part=np.asarray(table.column("part").to_numpy(), dtype=np.int64)
        if "part" in table.column_names
        else None,
    )


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


Resampled = Callable[[FloatArray], FloatArray]
"""Weights (resamples, examples) -> a metric (resamples,); NaN if undefined."""


@dataclass(frozen=True)
class Pair:
    """Two models on the same examples, in the same order.

    version, digest: the champion's version number and the digest of its weights.
    candidate, champion: each model's metric.
    units: (examples,), the unit of each example. Units count as a whole, negative ones not at all.
    slices: row numbers by slice value.
    """

    version: str
    digest: str
    candidate: Resampled
    champion: Resampled
    units: IntArray
    slices: Mapping[str, IntArray]


@dataclass(frozen=True)
class Rival:
    """A model that the candidate must beat even without a champion.

    what: names it, such as "the naive baseline".
    metric: the metric of both.
    candidate, rival: each model's metric.
    same: whether both have the same loss on each example.
    """

    what: str
    metric: str
    candidate: Resampled
    rival: Resampled
    same: bool = False


def mean(numerators: FloatArray, weights: FloatArray) -> Resampled:
    """Return a metric that adds up: the sum of numerators over the sum of weights.

    Args:
        numerators: (examples,).
        weights: (examples,).
    """

    def resampled(times: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore", divide="ignore"):
            values: FloatArray = times @ numerators / (times @ weights)
        return values

    return resampled


Parts = tuple[FloatArray, FloatArray]
"""Numerators and weights, (examples,) each."""


@runtime_checkable
class Metric(Protocol):
    """A metric of the test side, with its direction."""

    @property
    def greater_is_better(self) -> bool: ...

    def value(self, scores: Scores) -> float | None:
        """Return the metric over all examples, or None if it does not apply to these scores."""

    def resampled(self, scores: Scores, weights: FloatArray) -> FloatArray:
        """Compute the metric with each example counted as often as its weight says.

        Args:
            weights: (resamples, examples).

        Returns:
            (resamples,); NaN if undefined.
        """


@dataclass(frozen=True)
class MeanMetric:
    """A metric that adds up: the sum of the examples' numerators over the sum of their weights.

    parts: returns numerators and weights, or None if the metric does not apply.
    finish: turns means, (resamples,), into the metric, like the square root for a root mean squared
        error.
    """

    greater_is_better: bool
    parts: Callable[[Scores], Parts | None]
    finish: Callable[[FloatArray], FloatArray] | None = None

    def value(self, scores: Scores) -> float | None:
        parts = self.parts(scores)
        if parts is None:
            return None
        numerators, weights = parts
        return float(self._finished(numerators.sum(keepdims=True) / weights.sum())[0])

    def resampled(self, scores: Scores, weights: FloatArray) -> FloatArray:
        parts = self.parts(scores)
        assert parts is not None, "asked of scores to which it does not apply"
        return self._finished(mean(*parts)(weights))

    def _finished(self, means: FloatArray) -> FloatArray:
        return means if self.finish is None else self.finish(means)


@dataclass(frozen=True)
class SampleMetric:
    """A metric of a complete sample, such as the area under a ROC curve.

    of: computes the metric over all examples it gets, or returns None if it does not apply.
    at_once: does the same for many resamples, like `Metric.resampled`. If it is None, each resample
        is built and passed to `of`.
    """

    greater_is_better: bool
    of: Callable[[Scores], float | None]
    at_once: Callable[[Scores, FloatArray], FloatArray] | None = None

    def value(self, scores: Scores) -> float | None:
        return self.of(scores)

    def resampled(self, scores: Scores, weights: FloatArray) -> FloatArray:
        if self.at_once is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                return self.at_once(scores, weights)
        rows = np.arange(weights.shape[1])
        values = [self.of(scores.only(np.repeat(rows, times.astype(int)))) for times in weights]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


_Result = TypeVar("_Result")


@cache
def metrics() -> Mapping[str, Metric]:
    """Return all metrics by name, sorted by name.

    Raises:
        BadInput: a package's metric cannot be imported or is not a metric, or two metrics have the
            same name.
    """
    return {name: load_metric(name) for name in plugins.names(plugins.METRICS)}


def load_metric(name: str) -> Metric:
    """Return a metric.

    Raises:
        BadInput: it cannot be imported, or is not a metric.
    """
    return plugins.load_as(plugins.METRICS, name, Metric)


def measure(scores: Scores, how: Resampling) -> dict[str, Interval]:
    """Compute every metric that applies, each with its bootstrap interval."""
    values = point_values(scores)
    replicates = replicate(
        lambda weights: weighted_values(scores, weights, values), scores.units, how
    )
    return {name: how.interval(value, replicates[name]) for name, value in values.items()}


def measure_slices(scores: Scores) -> dict[str, dict[str, float]]:
    """Return "examples" and every metric that applies, by slice value."""
    return {
        value: {"examples": float(len(rows)), **point_values(scores.only(rows))}
        for value, rows in scores.by_slice().items()
    }


def point_values(scores: Scores) -> dict[str, float]:
    """Compute every metric that applies, and leave out undefined ones.

    Raises:
        SteadytrainError: a metric raised an exception.
    """
    values = {
        name: _computed(name, partial(metric.value, scores)) for name, metric in metrics().items()
    }
    return {name: value for name, value in values.items() if value is not None}


def weighted_values(
    scores: Scores, weights: FloatArray, names: Iterable[str]
) -> dict[str, FloatArray]:
    """Compute metrics with each example counted as often as its weight says.

    Args:
        weights: (resamples, examples).
        names: the metrics that apply.

    Returns:
        By name, (resamples,); NaN if undefined.
    """
    known = metrics()
    return {
        name: _computed(name, partial(known[name].resampled, scores, weights)) for name in names
    }


def _computed(name: str, compute: Callable[[], _Result]) -> _Result:
    """Run a metric's computation.

    Raises:
        SteadytrainError: it raised an exception. The message names the metric.
    """
    try:
        return compute()
    except Exception as error:
        raise SteadytrainError(
            f"the metric {name!r} cannot be computed: {type(error).__name__}: {error}",
            remedy="fix the metric, or uninstall the package that adds it",
        ) from error
