"""Two models on the same examples: the difference in each metric, and whether it can be chance.

Both models are measured on the same examples, so what makes an example hard for both cancels out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steadytrain.components.evaluate.bootstrap import (
    FloatArray,
    count_units,
    fewest_units,
    infinite_for_one,
    studentized,
)
from steadytrain.components.evaluate.metric import (
    MeanMetric,
    Metric,
    Scores,
    metrics,
    weighted_values,
)
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import Interval
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.components.shared.storage.local import open_regular


@dataclass(frozen=True)
class PairedDifference:
    """A metric of two models.

    values: of the first and of the second model.
    difference: the second value minus the first, with its interval. The ends are NaN if there are
        too few examples, or if a part of them has a value for one model only.
    """

    values: tuple[float, float]
    difference: Interval
    greater_is_better: bool

    @property
    def better(self) -> int | None:
        """The better model, 0 or 1; None if the difference may be chance."""
        low, high = self.difference.low, self.difference.high
        if not (low > 0 or high < 0):
            return None
        return int((low > 0) == self.greater_is_better)


def store_table(path: Path, table: pa.Table) -> Path:
    """Write scores or answers to a Parquet file, whole or not at all. Return its path."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    LocalStorage(path.parent).write(path.name, sink.getvalue().to_pybytes())
    return path


def read_scores(path: Path) -> Scores:
    """Read the per-example scores that the evaluate step stored.

    Raises:
        BadInput: the file is missing or damaged.
    """
    with _reading(path, "scores") as handle:
        return Scores.of(pq.read_table(handle))


def read_answers(path: Path) -> pa.Table:
    """Read the answers to lm-eval's tasks that the evaluate step stored.

    Raises:
        BadInput: the file is missing or damaged.
    """
    with _reading(path, "answers") as handle:
        return pq.read_table(handle)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[BinaryIO]:
    remedy = "run the evaluate step of that run again"
    try:
        with open_regular(path) as handle:
            yield handle
    except OSError as error:
        why = error.strerror or str(error).partition("\n")[0]
        raise BadInput(f"{path} cannot be read: {why}", remedy=remedy) from error
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInput(f"{path} does not hold {what}: {reason}", remedy=remedy) from error


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
        return "the examples are grouped differently (data.columns.group, data.group_by_prompt)"
    if first.classes and second.classes:
        one, other = first.classes, second.classes
        if one.probabilities.shape != other.probabilities.shape:
            return "the models have different classes"
        if not np.array_equal(one.label, other.label):
            return "the examples have different labels"
    if first.sets and second.sets and not np.array_equal(first.sets.truth, second.sets.truth):
        return "the examples have different labels"
    return ""


def paired_differences(
    first: Scores, second: Scores, names: Iterable[str], *, confidence: float, min_units: int
) -> dict[str, PairedDifference]:
    """Compare two models metric by metric. Leave out metrics that measured other spans of text.

    Args:
        first, second: scores of the same examples, in the same order.
        names: metrics that apply to both.
        confidence: level of the intervals.
        min_units: independent examples that a comparison needs.
    """
    known = {
        name: metrics()[name].greater_is_better
        for name in names
        if name in metrics()
        and np.array_equal(spans(metrics()[name], first), spans(metrics()[name], second))
    }

    def differences(weights: FloatArray) -> dict[str, FloatArray]:
        one, other = (weighted_values(scores, weights, known) for scores in (first, second))
        return {
            name: infinite_for_one(one[name], other[name], other[name] - one[name])
            for name in known
        }

    # Overflow gives a value that is not finite, and `studentized` checks for that.
    with np.errstate(all="ignore"):
        ones = np.ones((1, len(first.id)))
        one, other = (weighted_values(scores, ones, known) for scores in (first, second))
        result = studentized(differences, first.counted_units, confidence) if known else {}
    enough = count_units(first.counted_units) >= max(min_units, fewest_units(confidence))
    return {
        name: PairedDifference(
            (float(one[name][0]), float(other[name][0])),
            result[name]
            if enough
            else Interval(value=result[name].value, low=math.nan, high=math.nan),
            greater,
        )
        for name, greater in known.items()
    }


def spans(metric: Metric, scores: Scores) -> FloatArray:
    """Return each example's weight in a metric, (examples,).

    If the weights of two models are equal, both were scored on the same spans of text.
    """
    parts = metric.parts(scores) if isinstance(metric, MeanMetric) else None
    if parts is not None:
        return parts[1]
    return scores.bytes if scores.bytes.any() else scores.targets
