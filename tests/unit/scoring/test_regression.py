"""Predicted numbers are scored as scikit-learn and SciPy do it, and served in their own units."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

from steadytrain.components.evaluate.metric import Scores, metrics, point_values, weighted_values
from steadytrain.components.evaluate.step import evaluation_page
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.packaging import log_transformers_model

from support.stores import copy_store
from support.training import Bench, class_rows, write_data
from support.weight_digests import BERT

NUMBERS = pa.schema([("input_ids", pa.list_(pa.int32())), ("label", pa.float64())])
NAMES = ("mae", "mse", "pearson", "r2", "rmse", "spearman")


def of_peers(truth, found):
    """Return the metrics by scikit-learn and SciPy."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    return {
        "mae": mean_absolute_error(truth, found),
        "mse": mean_squared_error(truth, found),
        "rmse": mean_squared_error(truth, found) ** 0.5,
        "r2": r2_score(truth, found),
        "pearson": pearsonr(truth, found).statistic,
        "spearman": spearmanr(truth, found).statistic,
    }


def scores_of(truth, predicted):
    squared = np.square(truth - predicted)
    absent, ones = np.zeros(len(truth)), np.ones(len(truth), np.int64)
    columns = {
        "id": [str(row) for row in range(len(truth))],
        "group": pa.nulls(len(truth), pa.string()),
        "slice": pa.nulls(len(truth), pa.string()),
        "loss": squared,
        "targets": ones,
        "bytes": absent,
        "target": truth,
        "predicted": predicted,
        "squared_error": squared,
        "absolute_error": np.abs(truth - predicted),
    }
    return Scores.of(pa.table(columns))


@pytest.mark.parametrize("mean", [0.0, 5e4, -1e9])
def test_metrics_and_their_resamples_are_those_of_peers(mean):
    random = np.random.default_rng(0)
    truth = mean + random.integers(0, 9, 40) / 2
    predicted = truth + random.integers(-3, 4, 40)
    scores = scores_of(truth, predicted)
    weights = random.multinomial(40, np.full(40, 1 / 40), 5).astype(float)
    found, resampled = point_values(scores), weighted_values(scores, weights, NAMES)
    assert {name: found[name] for name in NAMES} == pytest.approx(of_peers(truth, predicted))
    for row, times in enumerate(weights.astype(int)):
        expected = of_peers(np.repeat(truth, times), np.repeat(predicted, times))
        assert {name: resampled[name][row] for name in NAMES} == pytest.approx(expected)
    for name in NAMES:
        assert metrics()[name].greater_is_better == (name in ("r2", "pearson", "spearman"))


def test_equal_numbers_have_no_correlation():
    found = point_values(scores_of(np.full(9, 0.1), np.arange(9.0)))
    assert not {"r2", "pearson", "spearman"} & found.keys()
    assert found["mae"] == pytest.approx(np.abs(0.1 - np.arange(9.0)).mean())


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A task, a model with random weights, and test records."""
    root = tmp_path_factory.mktemp("judged")
    rows = [{**row, "label": 100.0 + number**2} for number, row in enumerate(class_rows(9))]
    data = write_data(root / "data", rows, rows, task="sequence_regression", schema=NUMBERS)
    task = OpenTask(Bench.make(root, data, model={"config": BERT}).config, data)
    fields = {**BERT, "vocab_size": 64, "num_labels": 1, "problem_type": "regression"}
    config = AutoConfig.for_model(**fields, id2label={0: "price"})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    texts = [" ".join(f"w{token}" for token in row["input_ids"]) for row in rows]
    given = {"text": texts, "label": np.arange(9.0), "id": list(map(str, range(9)))}
    components = {"model": model, "tokenizer": task.training.tokenizer}
    return task, components, pa.table(given)


def test_scores_are_those_of_the_pipeline_of_transformers(judged):
    task, components, records = judged
    served = pipeline("text-classification", **components)
    answers = served(records["text"].to_pylist())
    assert {answer["label"] for answer in answers} == {"price"}
    expected = np.array([answer["score"] for answer in answers])
    scores = task.scorer.score(components, records)
    assert scores["predicted"].to_numpy() == pytest.approx(expected, rel=1e-5)
    errors = expected - np.arange(9.0)
    assert scores["squared_error"].to_numpy() == pytest.approx(errors**2, rel=1e-4)
    assert scores["absolute_error"].to_numpy() == pytest.approx(np.abs(errors), rel=1e-4)
    seen = np.array([100.0 + number**2 for number in range(9)])
    assert scores["loss"].to_numpy() == pytest.approx(errors**2 / seen.var(), rel=1e-4)
    assert Scores.of(scores).metric == "mse"


def test_baseline_is_the_mean_and_for_absolute_errors_the_median(judged):
    task, _, records = judged
    seen, truth = np.array([100.0 + number**2 for number in range(9)]), np.arange(9.0)
    found = point_values(Scores.of(task.scorer.score_baseline(records)))
    assert found["mse"] == pytest.approx(np.square(truth - seen.mean()).mean())
    assert found["mae"] == pytest.approx(np.abs(truth - np.median(seen)).mean())
    assert "pearson" not in found
    assert task.scorer.score_baseline(records.slice(0, 0)) is None


def test_worst_predictions_are_on_the_page(judged):
    task, components, records = judged
    table = task.scorer.score(components, records)
    record = EvaluationRecord(
        task="sequence_regression", weights_digest="0", examples=9, metrics={}, scores=""
    )
    page = evaluation_page(record, table, records, title="a run")
    assert re.search(">True</th>.*>Predicted</th>", page)
    worst = page.partition("Worst examples")[2].partition('<tr><th scope="row">')[2]
    assert worst.startswith(f"{np.argmax(table['loss'])}<")


def test_attack_makes_predictions_worse(judged):
    task, components, records = judged
    plain = Scores.of(task.scorer.score(components, records))
    attack = task.config.evaluation.attack.model_copy(update={"kind": "pgd", "epsilon": 0.5})
    worse = Scores.of(task.scorer.score_attacked(components, records, attack))
    assert point_values(worse)["mse"] > point_values(plain)["mse"]


@pytest.mark.slow
def test_served_model_predicts_numbers(judged, tmp_path, empty_store):
    import mlflow

    _, components, records = judged
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "a").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        uri = log_transformers_model(
            components, name="small", records=records, metadata={}, task="text-classification"
        )
    texts = records["text"].to_pylist()
    found = mlflow.pyfunc.load_model(uri).predict(texts)
    expected = [answer["score"] for answer in pipeline("text-classification", **components)(texts)]
    mlflow.set_tracking_uri(None)
    assert found["score"].tolist() == pytest.approx(expected, rel=1e-5)
    assert set(found["label"]) == {"price"}
