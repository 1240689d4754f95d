"""How the winner of a search turns what its members predict into probabilities and decisions.

Both are fitted on out-of-fold predictions, which no member learned from. Where they are scored,
they are fitted on the records of the other folds (`ensemble.held_out`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from steadytrain.components.automl.ensemble import (
    ALL,
    Limit,
    OutOfFold,
    Selection,
    held_out,
    standard_error,
    weighted_mean,
)
from steadytrain.components.evaluate.bootstrap import FloatArray, IntArray
from steadytrain.components.tabular.model import isotonic_chances
from steadytrain.components.tasks.scoring.thresholds import HALF, best_thresholds

Decision = Literal["likeliest", "balanced_accuracy", "macro_f1"]
_LEAST: Final = 1e-15
_WIDEST: Final = 3.0
"""The largest logarithm of a temperature or of its inverse."""
_ENOUGH: Final = 1000
"""Independent records from which probabilities may be calibrated by isotonic regression, which has
no shape and overfits fewer (Niculescu-Mizil and Caruana 2005, "Predicting Good Probabilities")."""
_CERTAIN: Final = 2.0
"""Standard errors that a temperature gains at least. It is judged by the records that it is fitted
to, which have also chosen the ensemble."""
_PARTS: Final = 3
"""Groups of folds, each of which scores the calibration that is fitted on the others."""
_PASSES: Final = 10
"""How often the weight of each class is chosen again, at most."""


@dataclass(frozen=True)
class Curve:
    """A probability by the one that members predict, in straight lines between points.

    at: what they predict, ascending.
    values: never falling.
    """

    at: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """What becomes of the mean of the members' probabilities.

    temperature: the logarithms are divided by it (Guo et al. 2017, "On Calibration of Modern Neural
        Networks").
    isotonic: a curve for each class, after which the probabilities are divided by their sum; of two
        classes, that of the second one alone (Zadrozny and Elkan 2002, "Transforming Classifier
        Scores into Accurate Multiclass Probability Estimates"). Empty if the temperature counts.
    decision: of each class, what its probability is multiplied with before the largest one decides;
        empty if the likeliest class does. Of sets, the probability from which each label is
        predicted; empty for a half.
    """

    temperature: float = 1.0
    decision: tuple[float, ...] = ()
    isotonic: tuple[Curve, ...] = ()

    def chances(self, mixed: FloatArray) -> FloatArray:
        """Return calibrated probabilities, of the same shape: (..., classes)."""
        if self.isotonic:
            shapes = [(one.at, one.values) for one in self.isotonic]
            curved: FloatArray = isotonic_chances(mixed, shapes)
            return curved
        raised = np.maximum(mixed, _LEAST) ** (1 / self.temperature)
        result: FloatArray = raised / raised.sum(axis=-1, keepdims=True)
        return result

    def decided(self, chances: FloatArray, labels: int = 0) -> IntArray:
        """Return the class of each row: (rows,).

        Args:
            labels: see `OutOfFold`.
        """
        if labels:
            yes = chances[:, 1].reshape(-1, labels) >= np.array(self.decision or (HALF,))
            flags: IntArray = yes.ravel().astype(np.int64)
            return flags
        result: IntArray = (chances * np.array(self.decision or (1.0,))).argmax(axis=1)
        return result


def fitted(
    found: OutOfFold,
    weights: Mapping[int, float],
    decision: Decision,
    *,
    many: bool | None = None,
) -> Calibration:
    """Fit the winner's calibration to out-of-fold predictions.

    Args:
        many: see `best_calibration`.
    """
    if found.final or not found.chances:
        return Calibration()
    mixed = mixed_chances(found, weights)
    calibration = best_calibration(mixed, found, many=many)
    if decision == "likeliest":
        return calibration
    chances = calibration.chances(mixed)
    if found.labels:
        flags = found.classes.reshape(-1, found.labels) == 1
        known = best_thresholds(flags, chances[:, 1].reshape(flags.shape), shared=False)
        return replace(calibration, decision=tuple(known))
    return replace(calibration, decision=thresholds(chances, found.classes, decision))


def best_calibration(
    mixed: FloatArray, found: OutOfFold, *, many: bool | None = None
) -> Calibration:
    """Return a temperature, or curves if they are better by more than chance.

    Both are compared on groups of folds, each fitted on the other groups.

    Args:
        mixed: the probabilities: (rows, classes).
        found: what they are predicted for.
        many: whether the records are enough for curves; None if that is to be counted.
    """
    soft = Calibration(temperature(mixed, found.classes, found.units))
    if not (_are_enough(found) if many is None else many):
        return soft
    gain = np.zeros(len(mixed))
    for part in range(_PARTS):
        inside = found.fold % _PARTS == part
        outside = ~np.isin(found.units, found.units[inside])
        if not inside.any():
            continue
        if len(np.unique(found.classes[outside])) < mixed.shape[1]:
            return soft
        truth, known = found.classes[outside], mixed[outside]
        losses = [
            found.only(np.flatnonzero(inside)).losses(
                one.chances(mixed[inside])[np.arange(inside.sum()), found.classes[inside]]
            )
            for one in (
                Calibration(temperature(known, truth, found.units[outside])),
                Calibration(isotonic=curves(known, truth)),
            )
        ]
        gain[inside] = losses[0] - losses[1]
    if gain.mean() <= standard_error(gain, found.units):
        return soft
    return Calibration(isotonic=curves(mixed, found.classes))


def _are_enough(found: OutOfFold) -> bool:
    return len(np.unique(found.units)) >= _ENOUGH


def curves(chances: FloatArray, truth: IntArray) -> tuple[Curve, ...]:
    """Return the isotonic regression of each class; of two classes, that of the second one.

    Args:
        chances: (rows, classes).
        truth: (rows,), the classes.
    """
    from sklearn.isotonic import IsotonicRegression

    points, count = list[Curve](), chances.shape[1]
    for index in range(count) if count > 2 else (1,):
        fitted = IsotonicRegression(out_of_bounds="clip").fit(chances[:, index], truth == index)
        # Two points may be as close as two numbers can be.
        values = (float(f"{value:.6g}") for value in fitted.y_thresholds_.tolist())
        points.append(Curve(tuple(fitted.X_thresholds_.tolist()), tuple(values)))
    return tuple(points)


def mixed_chances(found: OutOfFold, weights: Mapping[int, float]) -> FloatArray:
    """Return the weighted mean of the members' probabilities: (rows, classes)."""
    mean = weighted_mean({n: found.chances[n].astype(np.float64) for n in weights}, weights)
    # The shares may have a sum that rounds to more than 1.
    result: FloatArray = np.minimum(mean, 1.0)
    return result


def no_and_yes(chances: Any) -> Any:
    """Return the probabilities of two classes for each label: (..., labels, 2).

    Args:
        chances: of each label, that a record has it: (..., labels).
    """
    return np.stack([1 - chances, chances], axis=-1)


def temperature(chances: FloatArray, truth: IntArray, units: IntArray) -> float:
    """Return the temperature with the least log loss; 1 if it is better by no more than chance.

    Args:
        chances: (rows, classes).
        truth: (rows,), the classes.
        units: (rows,); see `OutOfFold`.
    """
    # Scipy takes half a second to import.
    from scipy.optimize import minimize_scalar

    rows, logs = np.arange(len(truth)), np.log(np.maximum(chances, _LEAST))

    def losses(exponent: float) -> FloatArray:
        scaled = logs * math.exp(-exponent)
        scaled = scaled - scaled.max(axis=1, keepdims=True)
        result: FloatArray = np.log(np.exp(scaled).sum(axis=1)) - scaled[rows, truth]
        return result

    best = minimize_scalar(
        lambda exponent: losses(exponent).mean(),
        bounds=(-_WIDEST, _WIDEST),
        method="bounded",
        options={"xatol": 1e-6},
    ).x
    gain = losses(0.0) - losses(best)
    # Digits that differ by the order of summation are left out: the value is part of best.yaml.
    result = float(f"{math.exp(best):.5g}")
    return result if gain.mean() > _CERTAIN * standard_error(gain, units) else 1.0


def thresholds(chances: FloatArray, truth: IntArray, decision: Decision) -> tuple[float, ...]:
    """Return the weights of the classes with which decisions are best.

    One class after another gets its best weight, while the others keep theirs. Of two classes, the
    first pass finds the best threshold of all.

    Args:
        chances: (rows, classes).
        truth: (rows,), the classes.
    """
    count = chances.shape[1]
    logs, known = np.log(np.maximum(chances, _LEAST)), np.zeros(count)
    likeliest = logs.argmax(axis=1)
    hits, taken, true = (
        np.bincount(rows, minlength=count) for rows in (truth[truth == likeliest], likeliest, truth)
    )
    best = float(_quality(hits.astype(float), taken.astype(float), true, decision))
    for _ in range(_PASSES):
        before = best
        for index in range(1 if count == 2 else 0, count):
            value, weight = _best_weight(logs + known, index, truth, decision)
            if value > best + 1e-12:
                best, known[index] = value, known[index] + weight
        if best <= before or count == 2:
            break
    return tuple(float(f"{math.exp(value):.6g}") for value in known)


def _best_weight(
    logs: FloatArray, index: int, truth: IntArray, decision: Decision
) -> tuple[float, float]:
    """Return the best quality, and the logarithm of the weight of a class that gives it."""
    count = logs.shape[1]
    others = logs.copy()
    others[:, index] = -math.inf
    rival = others.argmax(axis=1)
    needed = others.max(axis=1) - logs[:, index]
    order = np.argsort(needed, kind="stable")
    needed, rival, truth = needed[order], rival[order], truth[order]
    # The first n rows are decided for the class: each one is no longer decided for its rival.
    hits, taken = np.zeros((2, len(truth) + 1, count))
    hits[0] = np.bincount(truth[truth == rival], minlength=count)
    taken[0] = np.bincount(rival, minlength=count)
    rows = np.arange(1, len(truth) + 1)
    hits[rows, rival] -= truth == rival
    hits[:, index] += np.concatenate([[0], truth == index])
    taken[rows, rival] -= 1
    taken[1:, index] += 1
    true = np.bincount(truth, minlength=count)
    quality = _quality(hits.cumsum(axis=0), taken.cumsum(axis=0), true, decision)
    # Between equal rows there is no weight.
    allowed = np.concatenate([[True], needed[1:] > needed[:-1] + 1e-12, [True]])
    cut = int(np.where(allowed, quality, -math.inf).argmax())
    ends = np.concatenate([[needed[0] - 1], needed, [needed[-1] + 1]])
    return float(quality[cut]), float((ends[cut] + ends[cut + 1]) / 2)


def _quality(hits: FloatArray, taken: FloatArray, true: IntArray, decision: Decision) -> FloatArray:
    """Return the balanced accuracy or the mean F1 of the classes: (...,).

    As in the metrics of those names, classes that do not occur do not count.

    Args:
        hits: how many rows of each class are decided for it: (..., classes).
        taken: how many are decided for it: (..., classes).
        true: how many are of it: (classes,).
    """
    weights = true + 0 * taken if decision == "balanced_accuracy" else (true + taken) / 2
    total = np.asarray(weights, np.float64)
    there = total > 0
    shares = np.divide(hits, total, out=np.zeros_like(hits), where=there)
    result: FloatArray = shares.sum(axis=-1) / np.maximum(1, there.sum(axis=-1))
    return result


@dataclass(frozen=True)
class Promise:
    """What to expect of the winner: each row is predicted without its fold's part in any choice.

    losses: (rows,), in nats or squared.
    uncalibrated: (rows,), the same without the calibration.
    decided: (rows,), the classes; None for numbers.
    likeliest: (rows,), the likeliest classes, which labels have from a half on; None for numbers.
    """

    losses: FloatArray
    uncalibrated: FloatArray
    decided: IntArray | None = None
    likeliest: IntArray | None = None


def promised(
    found: OutOfFold,
    limits: Sequence[Limit],
    decision: Decision,
    selection: Selection = ALL,
) -> Promise:
    """Choose, calibrate and decide on the other folds, and predict each fold."""
    mixed = np.full(found.predicted.shape[1], math.nan)
    losses, decided, likeliest = mixed.copy(), np.zeros(len(mixed), int), np.zeros(len(mixed), int)
    # The others are fewer, and the promise is of what is fitted to all.
    many = _are_enough(found)
    for inside, outside, weights in held_out(found, limits, selection):
        held = found.only(inside)
        mixed[inside] = held.mixed(weights)
        if not held.chances:
            continue
        calibration = fitted(outside, weights, decision, many=many)
        chances = calibration.chances(mixed_chances(held, weights))
        losses[inside] = held.losses(chances[np.arange(len(inside)), held.classes])
        decided[inside] = calibration.decided(chances, held.labels)
        likeliest[inside] = Calibration().decided(chances, held.labels)
    plain = found.losses(mixed)
    return Promise(losses, plain, decided, likeliest) if found.chances else Promise(plain, plain)
