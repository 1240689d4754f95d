"""A classifier as model.base: its head answers for the classes that its rows were trained for."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.types import Validated, Warned
from steadytrain.components.tasks.base import OpenTask

from support.heads import FAMILIES
from support.training import (
    CLASSES,
    VOCABULARY,
    Bench,
    class_rows,
    events_of,
    write_data,
    write_tokenizer,
)
from support.weight_digests import BERT

NAMES = ["sad", "glad", "mad", "bad", "odd"]


def write_base(folder, names, fields=BERT):
    torch.manual_seed(0)
    ids = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    given = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0, **ids}
    config = AutoConfig.for_model(**{**fields, **given})
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


def task_for(folder, labels):
    """Return the training part of a run on data with these labels that starts from a folder."""
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"task": "sequence_classification", "source": ["unused"]},
            "model": {"base": str(folder)},
        }
    )
    data = SimpleNamespace(
        labels=labels,
        sequence_length=16,
        split_digest="0" * 64,
        tokenizer="tokenizer",
        path=lambda name: folder,
    )
    return OpenTask(config, data).training


def answers(model):
    """Return the logits of a text by the name of the class."""
    ids = torch.tensor([[5, 6, 7, 0]])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return {model.config.id2label[index]: value.item() for index, value in enumerate(logits)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_keeps_its_logit_in_any_order(tmp_path, family):
    before = answers(write_base(tmp_path, NAMES, {"model_type": family, **FAMILIES[family]}))
    labels = sorted(NAMES)
    task = task_for(tmp_path, labels)
    torch.manual_seed(1)
    model = task.build_model()
    assert model.config.id2label == dict(enumerate(labels))
    assert model.config.label2id == {label: index for index, label in enumerate(labels)}
    assert answers(model) == pytest.approx(before, abs=1e-6)
    assert list(task.ready(model)) == [
        "the classes of model.base are sad, glad, mad, bad, odd; the rows of its head are now in "
        "the order of the data: bad, glad, mad, odd, sad"
    ]


@pytest.mark.parametrize(
    ("names", "labels", "rows", "remark"),
    [
        (["a", "b", "c"], ["a", "b", "c"], [0, 1, 2], None),
        (["POSITIVE", "Negative "], ["negative", "positive"], [1, 0], "now in the order"),
        (["a", "A", "b"], ["b", "A", "a"], [2, 1, 0], "now in the order"),
        (["LABEL_0", "LABEL_1", "LABEL_2"], ["0", "1", "2"], [0, 1, 2], None),
        (["LABEL_0", "LABEL_1", "LABEL_2"], ["2", "0", "1"], [2, 0, 1], "now in the order"),
        (
            ["LABEL_0", "LABEL_1", "LABEL_2"],
            ["x", "y", "z"],
            [0, 1, 2],
            "does not name its classes, so its head is used in its order: LABEL_0 = x, LABEL_1 = y",
        ),
        (
            ["contradiction", "neutral"],
            ["no", "maybe"],
            [0, 1],
            "has other names for its classes, .* contradiction = no, neutral = maybe; if that",
        ),
        (["a", "b", "c"], ["b", "c", "d"], None, "head is new: .*are a, b, c, .* data's b, c, d"),
        (["a", "b", "c"], ["B", "d", "e"], None, "head is new: .*are a, b, c, .* data's B, d, e"),
        (["a", "b", "c"], ["a", "b"], None, r"3 classes \(a, b, c\) and the data 2 \(a, b\)"),
        (["a", "b"], ["a", "b", "c"], None, r"2 classes \(a, b\) and the data 3 \(a, b, c\)"),
    ],
)
def test_each_difference_of_classes_is_reported(tmp_path, names, labels, rows, remark):
    old = write_base(tmp_path, names).classifier
    task = task_for(tmp_path, labels)
    model = task.build_model()
    assert model.config.id2label == dict(enumerate(labels))
    if rows is None:
        shared = min(len(names), len(labels))
        assert not model.classifier.weight[:shared].equal(old.weight[:shared])
    else:
        assert model.classifier.weight.equal(old.weight[rows])
        assert model.classifier.bias.equal(old.bias[rows])
    remarks = task.ready(model)
    assert len(remarks) == bool(remark)
    assert not remark or re.search(remark, remarks[0]), remarks


def test_a_base_without_a_head_needs_no_remark(tmp_path):
    write_base(tmp_path, ["a", "b", "c"])
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: item for name, item in weights.items() if not name.startswith("classifier")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    task = task_for(tmp_path, ["c", "b", "a"])
    assert list(task.ready(task.build_model())) == []


def test_a_head_whose_rows_cannot_move_stops_the_run_and_shows_both_orders(tmp_path, monkeypatch):
    write_base(tmp_path, ["b", "a"])
    monkeypatch.setattr(torch.nn.Linear, "__repr__", torch.nn.Module.__repr__)
    monkeypatch.setattr(
        "steadytrain.components.tasks.text.class_head",
        lambda model: (_ for _ in ()).throw(BadInput("it has no linear layer", remedy="-")),
    )
    with pytest.raises(BadInput, match=r"its labels are b, a, the data's are a, b, and") as caught:
        task_for(tmp_path, ["a", "b"]).build_model()
    assert caught.value.remedy == "name the labels in the model's order in data.labels"


def test_models_that_only_answer_are_put_in_order_too(tmp_path):
    """A teacher, a curriculum's model, and the base that the gate compares with."""
    before = answers(write_base(tmp_path, NAMES))
    task = task_for(tmp_path, sorted(NAMES))
    model = task.load_reference(str(tmp_path), "model.base")
    assert model.config.id2label == dict(enumerate(sorted(NAMES)))
    assert answers(model) == pytest.approx(before, abs=1e-6)
    with pytest.raises(BadInput, match="labels are sad, glad, mad, bad, odd, and the data's are x"):
        task_for(tmp_path, ["x", *NAMES[1:]]).load_reference(str(tmp_path), "model.base")


@pytest.mark.slow
def test_a_run_on_a_trained_classifier_keeps_its_accuracy(tmp_path):
    """It scored 0.27 after a step of next to nothing, since its rows had other names."""
    rows = class_rows(200)
    data = write_data(
        tmp_path / "data",
        rows,
        class_rows(60, seed=1),
        task="sequence_classification",
        schema=CLASSES,
        labels=["a", "b", "c"],
        sequence_length=16,
    )
    recipe = {"global_batch_size": 20, "max_steps": 40, "learning_rate": 0.01}
    fields = {**BERT, "max_position_embeddings": 32}
    first = Bench.make(tmp_path / "first", data, model={"config": fields}, training=recipe)
    first.train_here()
    trained = events_of(first.workspace, Validated)[-1].metrics["accuracy"]
    assert trained > 0.9
    turned = [{**row, "label": (row["label"] + 1) % 3} for row in class_rows(60, seed=1)]
    other = write_data(
        tmp_path / "turned",
        [{**row, "label": (row["label"] + 1) % 3} for row in rows],
        turned,
        task="sequence_classification",
        schema=CLASSES,
        labels=["c", "a", "b"],
        sequence_length=16,
    )
    recipe = {"global_batch_size": 20, "max_steps": 1, "learning_rate": 1e-9}
    base = {"base": str(first.workspace.model)}
    second = Bench.make(tmp_path / "second", other, model=base, training=recipe)
    second.train_here()
    assert events_of(second.workspace, Validated)[-1].metrics["accuracy"] == trained
    warnings = [event.message for event in events_of(second.workspace, Warned)]
    assert sum("the order of the data: c, a, b" in warning for warning in warnings) == 1
    exported = AutoConfig.from_pretrained(second.workspace.model)
    assert exported.id2label == {0: "c", 1: "a", 2: "b"}
    assert exported.label2id == {"c": 0, "a": 1, "b": 2}
