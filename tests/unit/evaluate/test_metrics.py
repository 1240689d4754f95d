"""Metrics match scikit-learn as point values and under resampling weights."""

import math

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.classes import confusion, per_class
from steadytrain.components.evaluate.metric import (
    Scores,
    measure,
    measure_slices,
    point_values,
    weighted_values,
)

from support.evaluating import class_table, language_table


def random_classes(classes, count=120, seed=0):
    random = np.random.default_rng(seed)
    label = random.integers(classes, size=count)
    raw = random.random((count, classes)).round(1) + 0.05
    raw[np.arange(count), label] += 0.4
    return label, raw / raw.sum(axis=1, keepdims=True)


def test_language_metrics_are_weighted_by_tokens_and_bytes():
    values = point_values(Scores.of(language_table([10.0, 2.0], [5, 1], [20, 4])))
    assert values["loss"] == pytest.approx(12 / 6)
    assert values["perplexity"] == pytest.approx(math.exp(2))
    assert values["bits_per_byte"] == pytest.approx(12 / math.log(2) / 24)


def test_perplexity_of_a_hopeless_model_is_a_number():
    values = point_values(Scores.of(language_table([1e6], [1], [1])))
    assert math.isfinite(values["perplexity"])


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_under_weights_equal_scikit_learn_with_sample_weights(classes):
    from sklearn import metrics as sk

    label, probabilities = random_classes(classes)
    scores = Scores.of(class_table(label, probabilities))
    weights = np.random.default_rng(1).integers(0, 4, size=(5, len(label))).astype(float)
    found = weighted_values(scores, weights, point_values(scores))
    prediction = probabilities.argmax(axis=1)
    for row, weight in enumerate(weights):
        assert found["accuracy"][row] == pytest.approx(
            sk.accuracy_score(label, prediction, sample_weight=weight)
        )
        assert found["macro_f1"][row] == pytest.approx(
            sk.f1_score(label, prediction, average="macro", sample_weight=weight)
        )
        assert found["balanced_accuracy"][row] == pytest.approx(
            sk.balanced_accuracy_score(label, prediction, sample_weight=weight)
        )
        ranked = [1] if classes == 2 else range(classes)
        assert found["average_precision"][row] == pytest.approx(
            np.mean(
                [
                    sk.average_precision_score(
                        label == index, probabilities[:, index], sample_weight=weight
                    )
                    for index in ranked
                ]
            )
        )
        areas = [
            sk.roc_auc_score(label == index, probabilities[:, index], sample_weight=weight)
            for index in ranked
        ]
        assert found["auroc"][row] == pytest.approx(np.mean(areas))
        assert found["loss"][row] == pytest.approx(
            sk.log_loss(label, probabilities, sample_weight=weight)
        )


@pytest.mark.parametrize("classes", [2, 3])
def test_unit_weights_give_the_point_values(classes):
    scores = Scores.of(class_table(*random_classes(classes)))
    weighted = weighted_values(scores, np.ones((1, len(scores.id))), point_values(scores))
    assert {name: value[0] for name, value in weighted.items()} == pytest.approx(
        point_values(scores)
    )


def test_weighted_language_metrics():
    scores = Scores.of(language_table([10.0, 2.0], [5, 1], [20, 4]))
    found = weighted_values(scores, np.array([[1.0, 0.0], [1.0, 1.0]]), point_values(scores))
    assert found["loss"] == pytest.approx([2.0, 2.0])
    assert found["bits_per_byte"][1] == pytest.approx(point_values(scores)["bits_per_byte"])


def test_absent_class_is_left_out_of_means():
    label, probabilities = random_classes(2)
    wider = np.hstack([probabilities * 0.999, np.full((len(label), 1), 0.001)])
    narrow = point_values(Scores.of(class_table(label, probabilities)))
    wide = point_values(Scores.of(class_table(label, wider)))
    assert wide["macro_f1"] == pytest.approx(narrow["macro_f1"])


def test_auroc_of_several_data_sets_is_the_mean_of_theirs():
    """One of two classes and one of three. Each has probabilities for its own classes alone."""
    from sklearn import metrics as sk

    (first, two), (second, three) = random_classes(2, 50), random_classes(3, 90)
    label = np.concatenate([first, 2 + second])
    probabilities = np.zeros((140, 5))
    probabilities[:50, :2], probabilities[50:, 2:] = two, three
    order = np.random.default_rng(2).permutation(140)
    part = pa.array(np.repeat([0, 1], [50, 90])[order])
    table = class_table(label[order], probabilities[order]).append_column("part", part)
    scores = Scores.of(table)
    expected = [
        sk.roc_auc_score(first == 1, two[:, 1]),
        sk.roc_auc_score(second, three, multi_class="ovr"),
    ]
    found = point_values(scores)
    assert found["auroc"] == pytest.approx(np.mean(expected))
    weighted = weighted_values(scores, np.ones((1, 140)), found)
    assert weighted["auroc"][0] == pytest.approx(np.mean(expected))
    mine = scores.only(np.flatnonzero(np.asarray(part) == 1))
    assert point_values(mine)["auroc"] == pytest.approx(expected[1])
    assert "part" not in scores.columns


def test_class_that_a_resample_lacks_is_left_out_of_its_auroc():
    from sklearn import metrics as sk

    label, probabilities = random_classes(3)
    scores = Scores.of(class_table(label, probabilities))
    weights = np.array([label != 2, label == 0]).astype(float)
    with_two, with_one = weighted_values(scores, weights, ["auroc"])["auroc"]
    rows = label != 2
    areas = [sk.roc_auc_score(label[rows] == index, probabilities[rows, index]) for index in (0, 1)]
    assert with_two == pytest.approx(np.mean(areas))
    assert math.isnan(with_one)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_classes_are_those_of_scikit_learn(classes):
    from sklearn import metrics as sk

    label, probabilities = random_classes(classes)
    found = point_values(Scores.of(class_table(label, probabilities)))
    prediction = probabilities.argmax(axis=1)
    assert found["loss"] == pytest.approx(sk.log_loss(label, probabilities))
    assert found["balanced_accuracy"] == pytest.approx(
        sk.balanced_accuracy_score(label, prediction)
    )
    truth = np.eye(classes)[label] if classes > 2 else label
    scores = probabilities if classes > 2 else probabilities[:, 1]
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(truth, scores))
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(truth, scores))


def test_ranking_metrics_are_left_out_with_one_class():
    values = point_values(Scores.of(class_table([1, 1], [[0.2, 0.8], [0.6, 0.4]])))
    assert not {"auroc", "average_precision"} & {*values}
    assert values["balanced_accuracy"] == 0.5
    assert values["accuracy"] == 0.5


def test_confusion_and_classes_tell_true_from_predicted():
    scores = Scores.of(class_table([0, 0, 1], [[0.9, 0.1], [0.3, 0.7], [0.1, 0.9]]))
    assert confusion(scores.classes, 2) == [[1, 1], [0, 1]]
    table = per_class(scores.classes, ["cat", "dog"], {"cat": 0.75})
    assert table["cat"] == pytest.approx(
        {"precision": 1, "recall": 0.5, "f1": 2 / 3, "support": 2, "average_precision": 0.75}
    )
    assert table["dog"]["precision"] == pytest.approx(0.5)


def test_every_metric_comes_with_an_interval_around_it():
    measured = measure(Scores.of(class_table(*random_classes(3))), Resampling(300, 0.95, 0))
    ranked = {"auroc", "average_precision"}
    assert measured.keys() == {"loss", "accuracy", "balanced_accuracy", "macro_f1", "ece", *ranked}
    for interval in measured.values():
        assert interval.low < interval.value < interval.high


def test_slices_are_measured_separately():
    table = language_table([2.0, 8.0, 1.0], [1, 2, 1], [4, 8, 2], slices=["b", "a", None])
    slices = measure_slices(Scores.of(table))
    assert list(slices) == ["a", "b"]
    assert slices["a"]["loss"] == pytest.approx(4.0)
    assert slices["b"]["examples"] == 1


@pytest.mark.parametrize(
    ("table", "metric"),
    [
        (language_table([1.0], [1], [3]), "bits_per_byte"),
        (language_table([1.0], [1], [0]), "loss"),
        (class_table([0], [[0.9, 0.1]]), "accuracy"),
    ],
)
def test_comparison_metric_of_each_task(table, metric):
    scores = Scores.of(table)
    assert scores.metric == metric
    assert metric in point_values(scores)
