"""Any number of labels: the loss, the thresholds and the export are those of plain Transformers."""

from __future__ import annotations

import json

import mlflow
import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import f1_score
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.digest import weights_digest
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.checks import check_task
from steadytrain.components.tasks.model_fields import ineffective_fields
from steadytrain.components.tasks.multi_label import MultiLabelClassification, MultiLabelPackager
from steadytrain.components.tasks.scoring.multi_label import (
    FIELD,
    thresholds_of,
)
from steadytrain.components.tasks.scoring.thresholds import HALF, LEAST, best_thresholds

from support.data import side_rows
from support.stores import copy_store
from support.task_data import LABELS, STILL, data_of
from support.training import VOCABULARY

TASK = "multi_label_classification"


def configure(*, model=None, data=None, **sections):
    return from_mapping(
        {
            "name": "labels",
            "data": {"source": ["x"], "task": TASK, **(data or {})},
            "model": model or {"config": STILL},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_of(TASK, tmp_path_factory.mktemp("label-sets"))


@pytest.fixture(scope="module")
def rows(data):
    return side_rows(data, "train")


@pytest.fixture
def task(data):
    torch.manual_seed(0)
    return MultiLabelClassification(configure(), data)


def test_loss_and_gradients_are_those_of_transformers(task, rows):
    """In micro-batches of any size, divided by the number of records."""
    model = task.build_model().train()
    assert model.config.problem_type == TASK
    batch = task.collate(rows)
    plain = model(
        **{name: item for name, item in batch.items() if name != "targets"}, labels=batch["targets"]
    ).loss
    plain.backward()
    expected = {name: item.grad.clone() for name, item in model.named_parameters()}
    for size in (len(rows), 7):
        model.zero_grad()
        total = 0.0
        for start in range(0, len(rows), size):
            part = task.collate(rows[start : start + size])
            assert task.weight(part) == len(rows[start : start + size])
            loss = task.compute_loss(model, part).total / len(rows)
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(plain.item(), abs=1e-5)
        for name, item in model.named_parameters():
            torch.testing.assert_close(item.grad, expected[name], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        losses = task.row_losses(model, batch, [1] * len(rows))
    assert losses.mean().item() == pytest.approx(plain.item(), abs=1e-5)


def test_validation_metrics_are_those_of_scikit_learn(task, rows):
    model = task.build_model().eval()
    with torch.no_grad():
        model.classifier.weight.mul_(40)
        whole = task.collate(rows)
        sums = [task.validate(model, task.collate(rows[n : n + 9])) for n in range(0, len(rows), 9)]
        logits = model(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"]).logits
    found = task.validation_metrics({name: sum(each[name] for each in sums) for name in sums[0]})
    truth, predicted = whole["targets"].numpy() > 0, logits.sigmoid().numpy() >= HALF
    assert predicted.any()
    assert not predicted.all()
    assert found["micro_f1"] == pytest.approx(f1_score(truth, predicted, average="micro"))
    assert found["macro_f1"] == pytest.approx(
        f1_score(truth, predicted, average="macro", zero_division=np.nan)
    )
    assert found["subset_accuracy"] == pytest.approx((truth == predicted).all(1).mean())


@pytest.mark.slow
def test_thresholds_have_the_best_f1_of_all():
    rng = np.random.default_rng(0)
    truth = rng.random((200, 4)) < (0.5, 0.2, 0.1, 0.01)
    probabilities = np.round(np.clip(rng.random((200, 4)) * 0.6 + 0.3 * truth, 0, 1), 2)
    found = best_thresholds(truth, probabilities, shared=False)
    for label in range(3):
        of = [
            f1_score(truth[:, label], probabilities[:, label] >= cut)
            for cut in np.arange(0.005, 1, 0.005)
        ]
        mine = f1_score(truth[:, label], probabilities[:, label] >= found[label])
        assert mine == pytest.approx(max(of))
        assert min(np.abs(probabilities[:, label] - found[label])) > 1e-4
    assert truth[:, 3].sum() < LEAST
    assert found[3] == HALF
    # Nothing is better than to predict a label for all: the threshold is below every probability.
    certain = np.ones((20, 1), bool)
    assert best_thresholds(certain, np.full((20, 1), 1e-6), shared=False)[0] < 1e-6


def test_shared_threshold_has_the_best_micro_f1_of_all():
    rng = np.random.default_rng(0)
    truth = rng.random((200, 4)) < (0.5, 0.2, 0.1, 0.01)
    # The last two are learned badly: alone, each would best be predicted for almost all records.
    learned = truth * (0.4, 0.3, 0.02, 0.0)
    probabilities = np.round(np.clip(rng.random((200, 4)) * 0.5 + learned, 0, 1), 2)
    found = best_thresholds(truth, probabilities, shared=True)
    assert len({*found}) == 1

    def micro(cuts):
        return f1_score(truth, probabilities >= np.array(cuts), average="micro")

    assert micro(found) == pytest.approx(max(map(micro, np.arange(0.005, 1, 0.005))))
    assert micro(found) > micro(best_thresholds(truth, probabilities, shared=False)) + 0.05


def test_model_with_other_thresholds_is_another_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digests = []
    for thresholds in (None, {"a": 0.5}, {"a": 0.4}):
        content = {} if thresholds is None else {FIELD: thresholds}
        (tmp_path / "config.json").write_text(json.dumps(content))
        digests.append(weights_digest(tmp_path))
    assert len({*digests}) == 3
    (tmp_path / "config.json").unlink()
    assert weights_digest(tmp_path) == digests[0]


@pytest.mark.slow
def test_the_exported_model_has_its_thresholds_and_is_served_with_all_scores(
    tmp_path, request, task, data, monkeypatch, empty_store
):
    packager = MultiLabelPackager(task.config, data)
    model = task.build_model()
    monkeypatch.setattr("steadytrain.components.tasks.scoring.thresholds.LEAST", 1)
    folder = tmp_path / "model"
    folder.mkdir()
    packager.export(model, folder)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))[FIELD]
    assert list(stored) == list(LABELS)
    assert {*stored.values()} != {HALF}
    components = packager.load_exported(folder)
    assert thresholds_of(components["model"], LABELS).tolist() == [*stored.values()]
    # A model that starts from this one begins without them.
    start = MultiLabelClassification(configure(model={"base": str(folder)}), data).build_model()
    assert set(thresholds_of(start, LABELS)) == {HALF}

    texts = ["w1 w2 w3", "w4 w5"]
    served = pipeline("text-classification", model=str(folder), top_k=None)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    records = pa.table({"id": ["1", "2"], "text": texts, "label": [["a", "c"], []]})
    scores = OpenTask(task.config, data).scorer.score(components, records)
    tokenizer = components["tokenizer"]
    for text, row in zip(texts, scores.to_pylist(), strict=True):
        with torch.no_grad():
            chances = plain(**tokenizer(text, return_tensors="pt")).logits[0].sigmoid().numpy()
        assert row["probabilities"] == pytest.approx(chances, abs=1e-6)
        (given,) = served([text], function_to_apply="sigmoid")
        assert {item["label"]: item["score"] for item in given} == pytest.approx(
            dict(zip(LABELS, chances, strict=True)), abs=1e-6
        )
        above = [n for n, one in enumerate(LABELS) if chances[n] >= stored[one]]
        assert row["predictions"] == above

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    request.addfinalizer(lambda: mlflow.set_tracking_uri(before))
    place = (tmp_path / "artifacts").as_uri()
    with mlflow.start_run(experiment_id=mlflow.create_experiment("x", artifact_location=place)):
        uri = packager.log_model(folder, name="small", records=records, metadata={"kept": "yes"})
    logged = mlflow.pyfunc.load_model(uri)
    assert json.loads(logged.metadata.metadata["thresholds"]) == stored
    assert logged.metadata.metadata["kept"] == "yes"
    answered = logged.predict(texts)
    assert answered.shape == (2, len(LABELS))
    assert {cell["label"]: cell["score"] for cell in answered.iloc[1]} == pytest.approx(
        dict(zip(LABELS, chances, strict=True)), abs=1e-6
    )
    assert len(logged.metadata.signature.outputs) == len(LABELS)
    assert thresholds_of(packager.load_logged(uri)["model"], LABELS).tolist() == [*stored.values()]


def test_half_leaves_the_thresholds_out(tmp_path, data):
    config = configure(training={"label_thresholds": "half"})
    model = MultiLabelClassification(config, data).build_model()
    MultiLabelPackager(config, data).export(model, tmp_path)
    assert FIELD not in json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    each = configure(training={"label_thresholds": "per_label"})
    told = MultiLabelClassification(each, data).ready(model)
    assert "fewer than 10 validation records have the labels a, b, c: the thresh" in told[-1]
    assert not MultiLabelClassification(configure(), data).ready(model)
    assert not MultiLabelClassification(config, data).ready(model)


@pytest.mark.parametrize("value", [{"a": 2}, {"a": "x"}, {"a": True}, [0.5]])
def test_damaged_thresholds_are_an_error(value):
    config = AutoConfig.for_model("bert", **{FIELD: value})
    with pytest.raises(BadInput, match=FIELD):
        thresholds_of(type("Model", (), {"config": config}), LABELS)


def test_a_base_with_other_order_keeps_its_answers(tmp_path, data, rows):
    """The rows of its head move with the names of the labels."""
    torch.manual_seed(1)
    names = ["c", "a", "b"]
    fields = {**STILL, "vocab_size": VOCABULARY, "id2label": dict(enumerate(names))}
    base = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(**fields, problem_type=TASK)
    ).eval()
    base.save_pretrained(tmp_path / "base")
    task = MultiLabelClassification(configure(model={"base": str(tmp_path / "base")}), data)
    model = task.build_model().eval()
    batch = task.collate(rows[:4])
    del batch["targets"]
    with torch.no_grad():
        expected = base(**batch).logits[:, [names.index(label) for label in LABELS]]
        torch.testing.assert_close(model(**batch).logits, expected)
    assert "now in the order of the data" in task.ready(model)[0]


REFUSED = {
    "training.distillation": {"distillation": {"teacher": "x"}},
    "training.batch_contrastive": {"batch_contrastive": {"rows": 4}},
    "training.r_drop": {"r_drop": {"weight": 1.0}},
    "training.focal_loss": {"focal_loss": {"gamma": 2.0}},
    "training.class_weights": {"class_weights": {"kind": "balanced"}},
    "training.mixup": {"mixup": {"alpha": 0.4}},
    "training.label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "training.order": {"order": "balanced"},
    "training.metric_for_best_model": {"metric_for_best_model": "accuracy"},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_has_no_effect_is_refused(field):
    with pytest.raises(ConfigError, match=field):
        check_task(configure(training=REFUSED[field]))


def test_what_has_an_effect_is_taken():
    check_task(
        configure(
            training={
                "adversarial": {"kind": "fgm"},
                "metric_for_best_model": "macro_f1",
                "label_thresholds": "half",
            },
            evaluation={"character_noise": 0.1, "attack": {"kind": "fgm"}},
            gate={"metric": "mean_average_precision", "floors": {"hamming_loss": 0.2}},
        )
    )
    with pytest.raises(ConfigError, match=r"gate.metric .*no such metric"):
        check_task(configure(gate={"metric": "accuracy"}))
    with pytest.raises(ConfigError, match=r"label_thresholds.*has no such thresholds"):
        configure(data={"task": "sequence_classification"}, training={"label_thresholds": "half"})


@pytest.mark.parametrize(
    ("kind", "task", "refused"),
    [
        (TASK, TASK, False),
        ("single_label_classification", TASK, True),
        (TASK, "sequence_classification", True),
    ],
)
def test_the_kind_of_problem_is_that_of_the_task(kind, task, refused):
    found = [*ineffective_fields({"problem_type": kind}, task, given=False)]
    assert bool(found) is refused
