"""Score classifiers: probabilities, predictions, and losses of each record."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.shared.errors import DataError
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tasks.scoring.classification import (
    score_class_frequencies,
    score_classification,
)

from support.declared import assert_declared
from support.tiny import TEXTS, make_classifier

LABELS = ["code", "prose"]


def records(labels):
    texts = [TEXTS[index % len(TEXTS)] for index in range(len(labels))]
    return pa.table({"id": [str(i) for i in range(len(labels))], "text": texts, "label": labels})


def score(model, tokenizer, table, **changes):
    settings = {"labels": LABELS, "batch_size": 2, "max_length": 512}
    return score_classification(
        {"model": model, "tokenizer": tokenizer}, table, **(settings | changes)
    )


def test_scores_are_independent_of_batches(tokenizer):
    model = make_classifier(tokenizer, LABELS)
    table = records(["code", "prose", "code", "prose", "code"])
    scores = score(model, tokenizer, table)
    assert_declared("sequence_classification", scores)
    for row, record in enumerate(table.to_pylist()):
        inputs = tokenizer(record["text"], truncation=True, max_length=64, return_tensors="pt")
        with torch.inference_mode():
            logits = model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).logits[0]
        chances = logits.double().softmax(-1)
        truth = LABELS.index(record["label"])
        np.testing.assert_allclose(scores["probabilities"][row].as_py(), chances, rtol=1e-4)
        assert scores["loss"][row].as_py() == pytest.approx(-chances[truth].log().item(), rel=1e-4)
        assert scores["prediction"][row].as_py() == chances.argmax().item()
        assert scores["label"][row].as_py() == truth
    assert scores["targets"].to_pylist() == [1] * 5
    assert scores["bytes"].to_pylist() == [0] * 5


def test_confident_wrong_model_has_a_finite_loss(tokenizer):
    model = make_classifier(tokenizer, LABELS)
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([1000.0, 0.0]))
    loss = score(model, tokenizer, records(["prose"]))["loss"][0].as_py()
    assert loss == pytest.approx(1000, rel=0.01)


def test_unknown_label_is_reported(tokenizer):
    with pytest.raises(DataError, match="'poem' is not one of code, prose"):
        score(make_classifier(tokenizer, LABELS), tokenizer, records(["code", "poem"]))


def test_baseline_is_the_training_majority(tmp_path):
    table = pa.table({"label": pa.array([1, 1, 0], pa.int64())})
    path = str(tmp_path / "train.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    data = DataRecord(
        folder=str(tmp_path), fingerprint="f", task="sequence_classification",
        sides={"train": SideRecord(shards=["train.arrow"], rows=3, documents=3)},
        test_records="test.arrow", split_digest="s", labels=LABELS,
    )  # fmt: skip
    table = score_class_frequencies(data, records(["code", "prose", "code", "code"]))
    found = point_values(Scores.of(table))
    assert found["accuracy"] == 0.25
    assert found["loss"] == pytest.approx(-(3 * math.log(2 / 5) + math.log(3 / 5)) / 4)
    assert found["auroc"] == 0.5
    assert score_class_frequencies(data, records([]).slice(0, 0).cast(
        pa.schema([("id", pa.string()), ("text", pa.string()), ("label", pa.string())])
    )) is None  # fmt: skip
