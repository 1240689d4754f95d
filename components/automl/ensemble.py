"""Which configurations to combine: greedy selection with replacement on out-of-fold predictions.

Caruana et al. 2004, "Ensemble Selection from Libraries of Models". Each round adds the
configuration with which the mean of all chosen ones predicts best. Of the ensembles so far, the
smallest within noise of the best one wins: its mean loss is above the best one's by at most one
standard error of their paired difference. Such a choice among many depends on luck with the records
that it is made on. Where quality counts more than size, it is therefore made several times, each
time on a bootstrap sample of them, and the mean of all that was chosen wins (Breiman 1996, "Bagging
Predictors").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray

_LEAST: Final = 1e-15
_SEED: Final = 0
"""Of the samples. The same records are always sampled alike."""
_MOST: Final = 5000
"""Rows of a sample. The choice takes time in proportion to them."""


@dataclass(frozen=True)
class Selection:
    """How often to choose.

    rounds: picks of an ensemble at most.
    samples: bootstrap samples of the records, each of which chooses; with 0, all records choose.
    """

    rounds: int = 40
    samples: int = 0


ALL: Final = Selection()
SINGLE: Final = Selection(rounds=1)
BAGGED: Final = Selection(samples=20)


@dataclass(frozen=True)
class OutOfFold:
    """What configurations predicted for records that they did not learn from.

    A row is a record that a fold held out: with several divisions into folds, a record has several.
    Where a record has any number of labels, it has a row for each of them, one after another, whose
    classes are no and yes.

    predicted: (configurations, rows): the probability of the true class, or the number.
    truth: (rows,), the true numbers; None for classes.
    units: (rows,); the records of one unit depend on each other, and share the fold: but a fold
        holds out some times of each series.
    fold: (rows,), the fold that held a record out.
    chances: of each configuration, the probabilities: (rows, classes); empty for numbers.
    classes: (rows,), the true classes; empty for numbers.
    scale: (rows,), of forecasts: what their absolute error is divided by; None for other numbers.
    alone: places of configurations that are in no ensemble with others.
    labels: rows of a record, one for each label; 0 where it has one class or number.
    final: whether what they predict leaves as it is, without calibration or decisions.
    """

    predicted: FloatArray
    truth: FloatArray | None
    units: IntArray
    fold: IntArray
    chances: Sequence[NDArray[np.float32]] = ()
    classes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    scale: FloatArray | None = None
    alone: frozenset[int] = frozenset()
    labels: int = 0
    final: bool = False

    def only(self, rows: IntArray) -> OutOfFold:
        """Return some of the rows."""
        truth = None if self.truth is None else self.truth[rows]
        return OutOfFold(
            *(self.predicted[:, rows], truth, self.units[rows], self.fold[rows]),
            [each[rows] for each in self.chances],
            self.classes[rows] if self.chances else self.classes,
            None if self.scale is None else self.scale[rows],
            self.alone,
            self.labels,
            self.final,
        )

    def independent_of(self, rows: IntArray) -> IntArray:
        """Return the rows that depend on none of a fold's; of forecasts, those of other times."""
        if self.scale is not None:
            return np.flatnonzero(~np.isin(self.fold, self.fold[rows]))
        return np.flatnonzero(~np.isin(self.units, self.units[rows]))

    def frequencies(self) -> FloatArray:
        """Return the share of each row's class among the rows that do not depend on its fold.

        As by Laplace's rule of succession, each class counts once more.
        """
        result, classes = np.zeros(len(self.fold)), int(self.classes.max()) + 1
        for fold in np.unique(self.fold):
            inside = np.flatnonzero(self.fold == fold)
            others = self.classes[self.independent_of(inside)]
            counts = np.bincount(others, minlength=classes) + 1
            result[inside] = (counts / counts.sum())[self.classes[inside]]
        return result

    def losses(self, mean: FloatArray) -> FloatArray:
        """Return the loss of each row, in nats, squared or scaled: of the shape of `mean`."""
        if self.truth is None:
            result: FloatArray = -np.log(np.maximum(mean, _LEAST))
            return result
        if self.scale is not None:
            scaled: FloatArray = np.abs(mean - self.truth) / self.scale
            return scaled
        return np.square(mean - self.truth)

    def mixed(self, weights: Mapping[int, float]) -> FloatArray:
        """Return the weighted mean of predictions: (rows,)."""
        return weighted_mean({index: self.predicted[index] for index in weights}, weights)


def weighted_mean(values: Mapping[int, FloatArray], weights: Mapping[int, float]) -> FloatArray:
    """Return the mean of arrays of one shape, by their weights."""
    total = sum(weights.values())
    result: FloatArray = sum(
        (share / total * values[index] for index, share in weights.items()),
        start=np.zeros_like(next(iter(values.values()))),
    )
    return result


def chosen(
    found: OutOfFold, limits: Sequence[Limit] = (), selection: Selection = ALL
) -> Counter[int]:
    """Return how often each configuration is in the ensemble that wins.

    Args:
        limits: which all members together keep.
    """
    if selection.samples:
        ensembles = [it] if (it := _bagged(found, limits, selection)) else []
    else:
        ensembles = prefixes(greedy(found, limits, rounds=selection.rounds))
    ensembles += [
        Counter([index])
        for index in sorted(found.alone)
        if all(limit.costs[index] <= limit.most for limit in limits)
    ]
    return smallest(found, ensembles)


def prefixes(picks: Sequence[int]) -> list[Counter[int]]:
    """Return the ensembles after each pick."""
    return [Counter(picks[:end]) for end in range(1, len(picks) + 1)]


def smallest(found: OutOfFold, ensembles: Sequence[Counter[int]]) -> Counter[int]:
    """Return the smallest ensemble within noise of the best one; an empty one if there is none."""
    if not ensembles:
        return Counter()
    losses = [found.losses(found.mixed(each)) for each in ensembles]
    best = min(range(len(ensembles)), key=lambda index: (losses[index].mean(), index))
    near = [
        index
        for index, each in enumerate(losses)
        if (extra := each - losses[best]).mean() <= standard_error(extra, found.units)
    ]
    return ensembles[min(near, key=lambda at: (ensembles[at].total(), losses[at].mean(), at))]


def _bagged(found: OutOfFold, limits: Sequence[Limit], selection: Selection) -> Counter[int]:
    """Return how often each configuration is chosen by all samples.

    Those that are chosen least leave until the others together keep the limits.
    """
    result, random = Counter[int](), np.random.default_rng(_SEED)
    # Choosing needs no other probabilities, which are large.
    own = replace(found, chances=())
    for _ in range(selection.samples):
        sample = resampled(own, random)
        result += smallest(sample, prefixes(greedy(sample, limits, rounds=selection.rounds)))
    while any(limit.costs[list(result)].sum() > limit.most for limit in limits):
        del result[min(result, key=lambda index: (result[index], -index))]
    return result


def resampled(found: OutOfFold, random: np.random.Generator) -> OutOfFold:
    """Return a bootstrap sample of units with all their rows; one that is drawn twice is two.

    Of a larger sample, some rows are taken at random.
    """
    order = np.argsort(found.units, kind="stable")
    _, starts, counts = np.unique(found.units[order], return_index=True, return_counts=True)
    drawn = random.integers(len(starts), size=min(len(starts), _MOST))
    lengths = counts[drawn]
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    rows = order[np.repeat(starts[drawn], lengths) + within]
    units = np.repeat(np.arange(len(drawn)), lengths)
    if len(rows) > _MOST:
        kept = np.sort(random.choice(len(rows), _MOST, replace=False))
        rows, units = rows[kept], units[kept]
    return replace(found.only(rows), units=units)


@dataclass(frozen=True)
class Limit:
    """A limit on the sum over an ensemble's different members.

    costs: (configurations,).
    """

    most: float
    costs: FloatArray


def greedy(
    found: OutOfFold, limits: Sequence[Limit] = (), *, rounds: int = ALL.rounds
) -> list[int]:
    """Return the configuration that each round adds. Of equally good ones, the first is added.

    None is in `found.alone`.
    """
    total, picks = np.zeros(found.predicted.shape[1]), list[int]()
    if found.alone:
        mask = np.array([float(index in found.alone) for index in range(len(found.predicted))])
        limits = [*limits, Limit(0.5, mask)]
    for count in range(1, rounds + 1):
        means = (total + found.predicted) / count
        scores = found.losses(means).mean(axis=1)
        for limit in limits:
            spent = limit.costs[list(set(picks))].sum()
            more = limit.costs.copy()
            more[list(set(picks))] = 0
            scores = np.where(spent + more > limit.most, math.inf, scores)
        index = int(scores.argmin())
        if not math.isfinite(scores[index]):
            break
        picks.append(index)
        total += found.predicted[index]
    return picks


def standard_error(values: FloatArray, units: IntArray) -> float:
    """Return the standard error of the mean of values, whose units are independent."""
    sums = np.bincount(units, weights=values - values.mean())
    count = len(np.unique(units))
    return math.sqrt(float(np.square(sums).sum()) * count / max(1, count - 1)) / len(values)


def held_out(
    found: OutOfFold, limits: Sequence[Limit] = (), selection: Selection = ALL
) -> Iterator[tuple[IntArray, OutOfFold, Counter[int]]]:
    """Yield the rows of each fold, the others' rows, and the ensemble that is chosen on these.

    Its loss on the fold is what to expect of the ensemble that is chosen on all folds: no record
    takes part in the choice of what predicts it, nor does its row of another division.
    """
    for fold in np.unique(found.fold):
        inside = np.flatnonzero(found.fold == fold)
        outside = found.only(found.independent_of(inside))
        yield inside, outside, chosen(outside, limits, selection)
