"""Metrics of label sets are scikit-learn's, for all resamples at once too, and the baseline."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
from sklearn import metrics as sklearn_metrics

from steadytrain.components.evaluate.classes import average_precisions, per_label, precision_recall
from steadytrain.components.evaluate.metric import Scores, metrics, point_values
from steadytrain.components.evaluate.paired import unpaired
from steadytrain.components.evaluate.step import evaluation_page
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import EvaluationRecord, Interval
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.scoring.multi_label import constant_labels, label_flags
from steadytrain.components.tasks.scoring.table import score_table
from steadytrain.components.tune.cross_validation import Fold, predictions
from steadytrain.components.tune.trials import folder

from support.data import side_rows
from support.declared import assert_declared
from support.task_data import LABELS, data_of

TASK = "multi_label_classification"
NAMES = ["a", "b", "c", "d"]


def example_scores(seed=0, count=60):
    rng = np.random.default_rng(seed)
    truth = rng.random((count, 4)) < (0.6, 0.3, 0.2, 0.0)
    chances = np.round(np.clip(rng.random((count, 4)) * 0.7 + 0.25 * truth, 0, 1), 2)
    thresholds = np.array([0.5, 0.4, 0.6, 0.5])
    records = pa.table({"id": [str(n) for n in range(count)], "text": ["t"] * count})
    table = score_table(
        records,
        {
            "loss": rng.random(count),
            "targets": np.ones(count, int),
            "bytes": np.zeros(count, int),
            "labels": [np.flatnonzero(row) for row in truth],
            "predictions": [np.flatnonzero(row) for row in chances >= thresholds],
            "probabilities": list(chances),
            "thresholds": [thresholds] * count,
        },
    )
    return table, truth, chances, chances >= thresholds


def expected(truth, chances, predicted):
    seen = truth.any(axis=0)
    both = np.flatnonzero(seen & ~truth.all(axis=0))
    return {
        "auroc": sklearn_metrics.roc_auc_score(truth[:, both], chances[:, both], average="macro"),
        "balanced_accuracy": np.mean(
            [
                sklearn_metrics.balanced_accuracy_score(truth[:, label], predicted[:, label])
                for label in both
            ]
        ),
        "micro_f1": sklearn_metrics.f1_score(truth, predicted, average="micro"),
        "macro_f1": sklearn_metrics.f1_score(
            truth, predicted, average="macro", zero_division=np.nan
        ),
        "subset_accuracy": sklearn_metrics.accuracy_score(truth, predicted),
        "hamming_loss": sklearn_metrics.hamming_loss(truth, predicted),
        "mean_average_precision": sklearn_metrics.average_precision_score(
            truth[:, seen], chances[:, seen], average="macro"
        ),
    }


def test_metrics_are_those_of_scikit_learn_in_each_resample():
    table, truth, chances, predicted = example_scores()
    scores = Scores.of(table)
    assert scores.metric == "micro_f1"
    assert_declared(TASK, table)
    found = point_values(scores)
    assert found == pytest.approx(
        {**expected(truth, chances, predicted), "loss": np.mean(scores.loss)}
    )
    weights = np.random.default_rng(1).multinomial(60, [1 / 60] * 60, size=5).astype(float)
    names = [name for name in found if name != "loss"]
    with np.errstate(all="ignore"):
        resampled = {name: metrics()[name].resampled(scores, weights) for name in names}
    for number, row in enumerate(weights.astype(int)):
        again = np.repeat(np.arange(60), row)
        one = expected(truth[again], chances[again], predicted[again])
        assert {name: resampled[name][number] for name in names} == pytest.approx(one)
    assert {name: metrics()[name].greater_is_better for name in names} == {
        name: name != "hamming_loss" for name in names
    }


def test_labels_that_all_or_no_examples_have_are_not_told_apart():
    table, truth, *_ = example_scores()
    for flags in (np.zeros_like(truth), np.ones_like(truth)):
        column = pa.array([np.flatnonzero(row) for row in flags])
        place = table.column_names.index("labels")
        found = point_values(Scores.of(table.set_column(place, "labels", column)))
        assert not {"auroc", "balanced_accuracy"} & {*found}
        assert "hamming_loss" in found


def test_each_label_has_its_values_and_its_threshold():
    table, truth, chances, predicted = example_scores()
    sets = Scores.of(table).sets
    averages = average_precisions(sets, NAMES)
    found = per_label(sets, NAMES, averages)
    report = sklearn_metrics.classification_report(
        truth, predicted, target_names=NAMES, output_dict=True, zero_division=0
    )
    for index, name in enumerate(NAMES):
        mine = found[name]
        assert mine["threshold"] == (0.5, 0.4, 0.6, 0.5)[index]
        assert mine["f1"] == pytest.approx(report[name]["f1-score"])
        for key in ("precision", "recall", "support"):
            assert mine[key] == pytest.approx(report[name][key])
    assert found["a"]["average_precision"] == pytest.approx(
        sklearn_metrics.average_precision_score(truth[:, 0], chances[:, 0])
    )
    assert "d" not in averages
    assert {*precision_recall(sets, NAMES, averages)} == {"a", "b", "c"}
    evaluation = EvaluationRecord(
        task=TASK, weights_digest="w", examples=60, labels=NAMES, per_class=found, scores="s",
        metrics={"micro_f1": Interval(value=0.5, low=0.4, high=0.6)},
    )  # fmt: skip
    records = pa.table({"text": ["text"] * 60})
    page = evaluation_page(evaluation, table, records, title="x")
    assert ">threshold</th>" in page
    assert ">0.4000</td>" in page
    worst = page.partition("Worst examples")[2]
    first = int(np.argmax(np.asarray(table["loss"])))
    for flags in (truth, predicted):
        expected_names = ", ".join(np.array(NAMES)[flags[first] > 0]) or "no label"
        assert f">{expected_names}</td>" in worst.partition("</tr>")[2].partition("</tr>")[0]


def test_other_labels_of_the_examples_are_not_paired():
    one, other = (Scores.of(example_scores(seed)[0]) for seed in (0, 1))
    assert unpaired(one, one) == ""
    assert "different labels" in unpaired(one, other)
    few = one.only(np.array([3, 1]))
    assert few.sets.truth.shape == (2, 4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_of(TASK, tmp_path_factory.mktemp("label-sets"))


def configure(metric=None):
    return from_mapping(
        {
            "name": "labels",
            "data": {"source": ["x"], "task": TASK},
            "model": {"config": {"model_type": "bert"}},
            "gate": {"metric": metric},
        }
    )


def stored_truth(data):
    rows = side_rows(data, "train")
    truth = np.zeros((len(rows), len(LABELS)), bool)
    for flags, row in zip(truth, rows, strict=True):
        flags[row["label"]] = True
    return truth


@pytest.mark.parametrize(
    "metric", ["micro_f1", "macro_f1", "hamming_loss", "subset_accuracy", None]
)
def test_the_baseline_is_the_best_constant_of_the_training_side(data, metric):
    """No other set of labels is better for every record, by the metric of the gate."""
    truth = stored_truth(data)
    every = [np.array([bool(n >> bit & 1) for bit in range(3)]) for n in range(8)]
    name = metric or "micro_f1"

    def value(labels):
        found = expected(truth, np.zeros(truth.shape), np.tile(labels, (len(truth), 1)))[name]
        return -found if name == "hamming_loss" else found

    assert value(constant_labels(data, metric)) == pytest.approx(max(map(value, every)))
    records = pa.table({"id": ["1", "2"], "text": ["x", "y"], "label": [["a"], []]})
    scorer = OpenTask(configure(metric), data).scorer
    scores = Scores.of(scorer.score_baseline(records))
    assert (scores.sets.prediction == constant_labels(data, metric)).all()
    rates = (truth.sum(0) + 1) / (len(truth) + 2)
    np.testing.assert_allclose(scores.sets.probabilities[0], rates, rtol=1e-6)
    losses = [-np.log(np.where(has, rates, 1 - rates)).mean() for has in ((1, 0, 0), (0, 0, 0))]
    np.testing.assert_allclose(scores.loss, losses)
    assert scorer.score_baseline(records.slice(0, 0)) is None


def test_a_label_that_the_model_lacks_is_an_error():
    with pytest.raises(DataError, match="'z' is not one of a, b, c"):
        label_flags(pa.table({"label": [["a"], ["z"]]}), LABELS)


def test_out_of_fold_predictions_name_the_labels():
    table, truth, *_ = example_scores()
    stored = table.replace_schema_metadata({folder.LABELS: json.dumps(list(NAMES))})
    found = predictions([Fold("plain", 0, {}, stored)]).to_pylist()
    by_id = dict(zip(table["id"].to_pylist(), truth, strict=True))
    assert [row["labels"] for row in found] == [
        [name for name, has in zip(NAMES, by_id[row["id"]], strict=True) if has] for row in found
    ]
    assert {*itertools.chain(*(row["predictions"] for row in found))} <= {*NAMES}
