"""A linear classifier of texts by how often each token occurs: its features, and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_matrix
from sklearn.linear_model import SGDClassifier

_WEIGHTS, _SETTINGS = "model.safetensors", "classifier.json"


def new_classifier(classes: int, tokens: int, *, rate: float, alpha: float) -> SGDClassifier:
    """Return a classifier that has learned nothing. Rows are not shuffled again."""
    model = SGDClassifier(
        loss="log_loss", alpha=alpha, learning_rate="constant", eta0=rate, shuffle=False
    )
    # What the first call of partial_fit would set, so that a stored state can take its place.
    model.classes_, model.n_features_in_ = np.arange(classes), tokens
    rows = classes if classes > 2 else 1
    model.coef_, model.intercept_ = np.zeros((rows, tokens)), np.zeros(rows)
    model.t_ = 1.0
    return model


def counts(texts: Sequence[Iterable[int]], tokens: int) -> csr_matrix:
    """Return how often each token occurs, relative to the text's length: (texts, tokens)."""
    ids = [np.asarray(text, dtype=np.int64) for text in texts]
    ends = np.cumsum([0, *map(len, ids)])
    shares = np.concatenate([np.full(len(own), 1 / max(1, len(own))) for own in ids])
    matrix = csr_matrix((shares, np.concatenate(ids), ends), shape=(len(ids), tokens))
    matrix.sum_duplicates()
    return matrix


def log_chances(model: SGDClassifier, features: csr_matrix) -> np.ndarray:
    """Return the log-probability of each class: (texts, classes)."""
    return np.log(np.maximum(model.predict_proba(features), np.finfo(np.float64).tiny))


def predict(model: SGDClassifier, tokenizer: Any, texts: list[str], length: int) -> np.ndarray:
    """Return the log-probability of each class for the first `length` tokens: (texts, classes)."""
    ids = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    return log_chances(model, counts(ids, len(tokenizer)))


def write(model: SGDClassifier, folder: Path) -> None:
    """Write a classifier without pickle, so that reading it runs no code."""
    save_file({"coef": model.coef_, "intercept": model.intercept_}, folder / _WEIGHTS)
    shape = {"classes": len(model.classes_), "tokens": model.n_features_in_}
    (folder / _SETTINGS).write_text(json.dumps(shape))


def read(folder: Path) -> SGDClassifier:
    """Read a classifier to predict with."""
    model = new_classifier(**json.loads((folder / _SETTINGS).read_text()), rate=1.0, alpha=0.0)
    arrays = load_file(folder / _WEIGHTS)
    model.coef_, model.intercept_ = arrays["coef"], arrays["intercept"]
    return model
