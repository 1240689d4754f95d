"""How a classifier's confidence compares with its accuracy, and the metrics of each class."""

import numpy as np
import pytest

from steadytrain.components.evaluate.classes import (
    Classes,
    average_precisions,
    calibration_bins,
    calibration_error,
    precision_recall,
)


def classified(label, probabilities):
    probabilities = np.asarray(probabilities, dtype=float)
    return Classes(np.asarray(label), probabilities.argmax(axis=1), probabilities)


def drawn(count, truthful):
    """Return labels sampled from the probabilities, or uniformly if not `truthful`."""
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(3), size=count)
    chances = probabilities if truthful else np.full((count, 3), 1 / 3)
    label = [generator.choice(3, p=chance) for chance in chances]
    return classified(label, probabilities)


def error(classes, weights=None):
    return calibration_error(
        classes, np.ones((1, len(classes.label))) if weights is None else weights
    )


def test_error_is_the_bin_weighted_gap_of_confidence_and_accuracy():
    # Two at confidence 0.9, one of them right, and two at 0.6, both right:
    # (2 * 0.4 + 2 * 0.4) / 4.
    classes = classified([0, 1, 0, 0], [[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    assert error(classes) == pytest.approx([0.4])
    first, second = calibration_bins(classes)
    assert (first.examples, first.confidence, first.accuracy) == (2, pytest.approx(0.6), 1.0)
    assert (second.examples, second.confidence, second.accuracy) == (2, pytest.approx(0.9), 0.5)


def test_weights_act_as_repetitions():
    classes = drawn(50, truthful=False)
    weights = np.random.default_rng(1).integers(0, 4, size=(3, 50))
    for row, found in zip(weights, error(classes, weights), strict=True):
        repeated = np.repeat(np.arange(50), row)
        alone = Classes(
            classes.label[repeated], classes.prediction[repeated], classes.probabilities[repeated]
        )
        assert found == pytest.approx(error(alone)[0])


def test_honest_confidence_is_calibrated():
    assert error(drawn(20_000, truthful=True))[0] < 0.02
    assert error(drawn(20_000, truthful=False))[0] > 0.2


def test_confidence_one_is_in_the_last_bin():
    assert error(classified([0, 0], [[1.0, 0.0], [1.0, 0.0]])) == pytest.approx([0.0])


def test_curves_show_the_worst_classes_and_the_average():
    from sklearn.metrics import average_precision_score

    classes, names = drawn(400, truthful=True), ["a", "b", "c"]
    averages = average_precisions(classes, names)
    assert averages["b"] == pytest.approx(
        average_precision_score(classes.label == 1, classes.probabilities[:, 1])
    )
    curves = precision_recall(classes, names, averages)
    assert list(curves) == sorted(averages, key=averages.get)
    for name, points in curves.items():
        recall, precision = zip(*points, strict=True)
        assert (recall[0], recall[-1]) == (1.0, 0.0)
        assert list(recall) == sorted(recall, reverse=True)
        assert len(points) <= 100
        assert -np.trapezoid(precision, recall) == pytest.approx(averages[name], abs=0.02)


def test_class_without_examples_has_no_curve():
    classes = classified([0, 1], [[0.8, 0.1, 0.1], [0.3, 0.6, 0.1]])
    averages = average_precisions(classes, ["a", "b", "c"])
    assert averages.keys() == {"a", "b"}
    assert precision_recall(classes, ["a", "b", "c"], averages).keys() == {"a", "b"}
