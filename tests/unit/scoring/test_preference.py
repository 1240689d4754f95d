"""Scores of preferences on the test side: those of training, on raw records."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.evaluate.metrics import PREFERENCE_ACCURACY, PREFERENCE_MARGIN
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.tasks.encoding.base import Content
from steadytrain.components.tasks.encoding.preference import (
    PreferenceEncoder,
    PreferenceRows,
    UnpairedPreferenceEncoder,
    UnpairedPreferenceRows,
)
from steadytrain.components.tasks.preference import PreferenceTraining, UnpairedPreferenceTraining
from steadytrain.components.tasks.scoring.preference import (
    PreferenceScorer,
    UnpairedPreferenceScorer,
)

from support.declared import assert_declared
from support.tiny import make_language_model
from support.training import write_data

PAIRS = [("import", "so be it", "no"), ("why?", "json", "a much longer answer " * 20)]


@pytest.fixture
def judged(tmp_path, language_folder, tokenizer):
    """Return configuration, data and test records."""
    data = write_data(tmp_path / "data", [], [], task="preference", tokenizer=False)
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"source": ["unused"], "task": "preference", "sequence_length": 96},
            "model": {"base": str(language_folder)},
            "training": {"dpo": {"beta": 0.4}},
            "evaluation": {"batch_size": 3},
        }
    )
    data = data.model_copy(update={"tokenizer": "tokenizer", "sequence_length": 96})
    encoder = PreferenceEncoder(config.data)
    names = ("prompt", "chosen", "rejected")
    texts = [encoder.read(dict(zip(names, pair, strict=True))).text for pair in PAIRS]
    content = pa.table({"content": pa.array(texts, pa.string())})
    ids = pa.array([str(index) for index in range(len(texts))])
    return config, data, pa.table({"id": ids, **encoder.test_columns(content)})


def test_scores_are_those_of_training(judged, tokenizer, tmp_path):
    config, data, records = judged
    model = make_language_model("llama", len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    table = PreferenceScorer(config, data).score({"model": model, "tokenizer": tokenizer}, records)
    assert_declared("preference", table)
    scores = Scores.of(table)
    encoded = PreferenceRows(tmp_path / "data" / "tokenizer", 96).encode(
        [Content(text) for text in records["pair"].to_pylist()]
    )
    task = PreferenceTraining(config, data)
    task.ready(model)
    sums = task.validate(model, task.collate([record.rows[0].values for record in encoded]))
    expected = task.validation_metrics(sums)
    assert scores.loss.mean() == pytest.approx(expected["loss"], rel=1e-5)
    assert PREFERENCE_MARGIN.value(scores) == pytest.approx(
        expected["preference_margin"], rel=1e-4, abs=1e-5
    )
    assert PREFERENCE_ACCURACY.value(scores) == expected["preference_accuracy"]
    assert abs(scores.columns["margin"]).min() > 1e-3


def test_the_base_has_no_margin(judged, tokenizer):
    config, data, records = judged
    base = make_language_model("llama", len(tokenizer))
    scorer = PreferenceScorer(config, data)
    scores = Scores.of(scorer.score({"model": base, "tokenizer": tokenizer}, records))
    np.testing.assert_allclose(scores.columns["margin"], 0, atol=1e-6)
    assert scores.loss.mean() == pytest.approx(
        point_values(Scores.of(scorer.score_baseline(records)))["loss"]
    )


UNPAIRED = [("import", "so be it", True), ("why?", "a much longer answer " * 20, False)]
KTO = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}


def test_scores_of_feedback_without_pairs_are_those_of_training(judged, tokenizer, tmp_path):
    config, data, records = judged
    config = from_mapping(
        {
            "name": "tiny",
            "data": {
                "source": ["unused"],
                "task": "unpaired_preference",
                "sequence_length": 96,
            },
            "model": {"base": config.model.base},
            "training": {"kto": KTO},
            "evaluation": {"batch_size": 1},
        }
    )
    encoder = UnpairedPreferenceEncoder(config.data)
    names = ("prompt", "completion", "label")
    texts = [encoder.read(dict(zip(names, row, strict=True))).text for row in UNPAIRED]
    content = pa.table({"content": pa.array(texts, pa.string())})
    records = pa.table({"id": records["id"], **encoder.test_columns(content)})
    model = make_language_model("llama", len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    scorer = UnpairedPreferenceScorer(config, data)
    table = scorer.score({"model": model, "tokenizer": tokenizer}, records)
    assert_declared("unpaired_preference", table)
    scores = Scores.of(table)
    encoded = UnpairedPreferenceRows(tmp_path / "data" / "tokenizer", 96).encode(
        [Content(text) for text in texts]
    )
    task = UnpairedPreferenceTraining(config, data)
    task.ready(model)
    sums = task.validate(model, task.collate([record.rows[0].values for record in encoded]))
    expected = task.validation_metrics(sums)
    assert scores.loss.mean() == pytest.approx(expected["loss"], rel=1e-5)
    assert PREFERENCE_MARGIN.value(scores) == pytest.approx(
        expected["preference_margin"], rel=1e-4, abs=1e-5
    )
    assert PREFERENCE_ACCURACY.value(scores) == expected["preference_accuracy"]
    assert abs(scores.columns["margin"]).min() > 1e-3
    baseline = Scores.of(scorer.score_baseline(records))
    np.testing.assert_allclose(baseline.loss, [0.75, 0.25])
