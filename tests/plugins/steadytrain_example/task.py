"""Scores a classifier of token counts, writes it, loads it, and logs it to MLflow."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import mlflow

from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.scoring.classification import (
    class_scores,
    label_indices,
    score_class_frequencies,
)
from steadytrain_example.token_counts import predict, read, write

_FOLDER = "model"
_NEEDED = ("scikit-learn", "safetensors", "transformers", "steadytrain-example")


class TokenCountsScorer:
    """Scores texts. A loaded model is "model", an SGDClassifier, and "tokenizer"."""

    def __init__(self, config, data):
        self.data = data

    def score(self, components, records):
        texts, length = records.column("text").to_pylist(), self.data.sequence_length
        chances = predict(components["model"], components["tokenizer"], texts, length)
        return class_scores(records, label_indices(records, self.data.labels), chances)

    def score_baseline(self, records):
        return score_class_frequencies(self.data, records)


class TokenCountsPackager:
    """Stores the classifier next to its tokenizer."""

    def __init__(self, config, data):
        self.data = data

    def export(self, model, folder):
        write(model, folder)
        load_tokenizer(self.data.path(self.data.tokenizer)).save_pretrained(folder)

    def load_exported(self, folder):
        return {"model": read(folder), "tokenizer": load_tokenizer(folder)}

    def log_model(self, folder, *, name, records, metadata):
        logged = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(Path(__file__).with_name("served.py")),
            artifacts={_FOLDER: str(folder)},
            model_config={"labels": self.data.labels, "length": self.data.sequence_length},
            input_example=records.column("text").to_pylist()[:1],
            metadata=metadata,
            pip_requirements=[f"{package}=={version(package)}" for package in _NEEDED],
        )
        return logged.model_uri

    def load_logged(self, model_uri):
        # Only the files: MLflow's own load_model would run the code that is registered with them.
        with tempfile.TemporaryDirectory() as scratch:
            place = mlflow.artifacts.download_artifacts(model_uri, dst_path=scratch)
            return self.load_exported(Path(place) / "artifacts" / _FOLDER)
