"""Two models on the same examples: the difference in each metric, and whether it can be chance.

A paired bootstrap: each resample measures both models on the same examples, so what makes an
example hard for both cancels out. Efron and Tibshirani, An Introduction to the Bootstrap (1993),
chapter 16; Koehn, Statistical Significance Tests for Machine Translation Evaluation (2004).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.bootstrap import FloatArray, Resampling, replicate
from steadytrain.components.evaluate.measure import metrics, weighted_values
from steadytrain.components.evaluate.metric import MeanMetric, Metric
from steadytrain.components.evaluate.scores import Scores
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import Interval
from steadytrain.components.shared.storage.regular import open_regular


@dataclass(frozen=True)
class PairedDifference:
    """A metric of two models.

    values: of the first and of the second model.
    difference: the second value minus the first, with its interval. The ends are NaN if there are
        too few examples, or if a resample has a value for one model only.
    """

    values: tuple[float, float]
    difference: Interval
    greater_is_better: bool

    @property
    def better(self) -> int | None:
        """Which model is better, 0 or 1; None if the difference can be chance."""
        low, high = self.difference.low, self.difference.high
        if not (low > 0 or high < 0):
            return None
        return int((low > 0) == self.greater_is_better)


def read_scores(path: Path) -> Scores:
    """Read the per-example scores that the evaluate step stored.

    Raises:
        BadInput: the file is missing or damaged.
    """
    remedy = "run the evaluate step of that run again"
    try:
        with open_regular(path) as handle:
            table = pq.read_table(handle)
        return Scores.of(table)
    except OSError as error:
        why = error.strerror or str(error).partition("\n")[0]
        raise BadInput(f"{path} cannot be read: {why}", remedy=remedy) from error
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise BadInput(f"{path} does not hold scores: {said}", remedy=remedy) from error


def unpaired(first: Scores, second: Scores) -> str:
    """Return why the scores of two models cannot be paired, or "" if they can."""
    if not first.id:
        return "there are no examples"
    if first.id != second.id:
        shared = len(set(first.id) & set(second.id))
        return (
            f"the models were scored on different examples ({len(first.id):,} and "
            f"{len(second.id):,}, of which {shared:,} are the same)"
        )
    if not np.array_equal(first.units, second.units):
        return "the examples are grouped differently (data.columns.group)"
    if first.classes and second.classes:
        one, other = first.classes, second.classes
        if one.probabilities.shape != other.probabilities.shape:
            return "the models have different classes"
        if not np.array_equal(one.label, other.label):
            return "the examples have different labels"
    return ""


def paired_differences(
    first: Scores, second: Scores, names: Iterable[str], how: Resampling
) -> dict[str, PairedDifference]:
    """Compare two models metric by metric. Leave out metrics that measured other spans of text.

    Args:
        first, second: scores of the same examples, in the same order.
        names: metrics that apply to both.
    """
    known = {
        name: metrics()[name].greater_is_better
        for name in names
        if name in metrics()
        and np.array_equal(spans(metrics()[name], first), spans(metrics()[name], second))
    }

    def values(weights: FloatArray) -> dict[str, FloatArray]:
        found = {}
        for index, scores in enumerate((first, second)):
            for name, value in weighted_values(scores, weights, known).items():
                found[f"{name} {index}"] = value
        return found

    # Overflow gives a value that is not finite, and `_difference` checks for that.
    with np.errstate(all="ignore"):
        points = values(np.ones((1, len(first.id))))
        resampled = replicate(values, first.units, how) if known else {}
    enough = len(np.unique(first.units)) >= how.fewest_units
    return {
        name: PairedDifference(
            (float(points[f"{name} 0"][0]), float(points[f"{name} 1"][0])),
            _difference(
                *(points[f"{name} {index}"] for index in (0, 1)),
                *(resampled[f"{name} {index}"] for index in (0, 1)),
                how=how if enough else None,
            ),
            greater,
        )
        for name, greater in known.items()
    }


def _difference(
    first: FloatArray,
    second: FloatArray,
    first_resampled: FloatArray,
    second_resampled: FloatArray,
    *,
    how: Resampling | None,
) -> Interval:
    value = float((second - first)[0])
    # A resample may have nothing to measure in either model, such as examples of only one class.
    defined = ~(np.isnan(first_resampled) & np.isnan(second_resampled))
    differences = (second_resampled - first_resampled)[defined]
    if how is None or not len(differences) or not np.isfinite(differences).all():
        return Interval(value=value, low=math.nan, high=math.nan)
    return how.interval(value, differences)


def spans(metric: Metric, scores: Scores) -> FloatArray:
    """Return each example's weight in a metric, (examples,).

    If the weights of two models are equal, both were scored on the same spans of text.
    """
    parts = metric.parts(scores) if isinstance(metric, MeanMetric) else None
    if parts is not None:
        return parts[1]
    return scores.bytes if scores.bytes.any() else scores.targets
