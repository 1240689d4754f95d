"""Models of numbers and of sets of labels on real data, from a file to a champion, on two ranks."""

from __future__ import annotations

import csv
import json

import mlflow
import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from steadytrain.components.shared.records import EvaluationRecord, GateRecord

CONFIG = {
    "name": "progression",
    "data": {
        "task": "sequence_regression",
        "source": ["patients.csv"],
        "columns": {"label": "progression"},
        "sequence_length": 64,
        "validation_share": 0.15,
        "test_share": 0.25,
        # Each text is made of the same fifty words.
        "near_duplicate_threshold": None,
    },
    "model": {
        "vocab_size": 400,
        "config": {
            "model_type": "bert",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        },
    },
    "training": {
        "global_batch_size": 16,
        "max_steps": 300,
        "learning_rate": 3e-3,
        "eval_steps": 60,
        "metric_for_best_model": "r2",
    },
    "compute": {"nproc_per_node": 2, "device": "cpu", "threads_per_rank": 1},
}


def patients():
    """Return what each patient's measurements are among those of all, in words, and the disease."""
    found = load_diabetes(scaled=False)
    fifths = [
        np.searchsorted(np.quantile(each, [0.2, 0.4, 0.6, 0.8]), each) for each in found.data.T
    ]
    names = [
        [f"{name}{'abcde'[at]}" for at in each]
        for name, each in zip(found.feature_names, fifths, strict=True)
    ]
    return list(zip(*names, strict=True)), found.target


def write_patients(path):
    words, progression = patients()
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["text", "progression"])
        writer.writerows(zip(map(" ".join, words), progression, strict=True))


def promoted(steadytrain, content):
    """Run a configuration. Return the run's folder, its evaluation and its gate."""
    file = steadytrain.output.parent / "my.yaml"
    file.write_text(json.dumps({**content, "output": str(steadytrain.output)}))
    done = steadytrain("run", "my.yaml")
    assert done.code == 0, done.out + done.err
    (run,) = done.runs
    gate = GateRecord.load(run / "records" / "gate.json")
    assert gate.promoted
    return run, EvaluationRecord.load(run / "records" / "evaluate.json"), gate


@pytest.mark.long
def test_progression_of_a_disease_is_predicted_and_served(steadytrain):
    folder = steadytrain.output.parent
    write_patients(folder / "patients.csv")
    run, evaluation, gate = promoted(steadytrain, CONFIG)
    assert (gate.metric, gate.greater_is_better) == ("mse", False)
    assert evaluation.metrics["mse"].value < 0.8 * evaluation.baselines["mse"]
    assert evaluation.metrics["r2"].value > 0.2
    assert "Numbers to predict" in (run / "report.html").read_text()
    store = f"sqlite:///{steadytrain.output / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    served = mlflow.pyfunc.load_model("models:/progression@champion")
    low, high = served.predict(["bmia bpa s5a", "bmie bpe s5e"])["score"]
    assert 25 < low < high < 350


@pytest.mark.long
def test_high_measurements_are_found_each_for_itself(steadytrain):
    folder = steadytrain.output.parent
    lines = [
        {"text": " ".join(words), "high": [word[:-1] for word in words if word[-1] == "e"]}
        for words in patients()[0]
    ]
    (folder / "patients.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {
        **CONFIG["data"],
        "task": "multi_label_classification",
        "source": ["patients.jsonl"],
        "columns": {"label": "high"},
    }
    training = {**CONFIG["training"], "metric_for_best_model": "micro_f1"}
    content = {**CONFIG, "name": "high", "data": data, "training": training}
    run, evaluation, gate = promoted(steadytrain, content)
    assert (gate.metric, gate.greater_is_better) == ("micro_f1", True)
    assert evaluation.metrics["micro_f1"].value > 1.3 * evaluation.baselines["micro_f1"]
    (model,) = (run / "model").glob("config.json")
    thresholds = json.loads(model.read_text())["steadytrain_thresholds"]
    assert thresholds.keys() == {word for line in lines for word in line["high"]}
