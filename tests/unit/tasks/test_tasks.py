"""The built-in tasks, and user-defined tasks."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config.data_sections import MULTIMODAL, SERIES, TABLES
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning

from support.stores import copy_store
from support.training import (
    CLASSES,
    GPT2,
    LLAMA,
    Bench,
    class_rows,
    language_rows,
    write_data,
)

BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


LABELS = {
    "sequence_classification": ["a", "b", "c"],
    "multi_task": ["mood/a", "mood/b", "topic/a", "topic/b"],
}


def task_of(tmp_path, name, model, **training):
    classes = name in LABELS
    data = write_data(
        tmp_path / "data",
        class_rows(6) if classes else language_rows(6),
        [],
        task=name,
        schema=CLASSES if classes else write_data.__kwdefaults__["schema"],
        labels=LABELS.get(name, []),
    )
    bench = Bench.make(tmp_path, data, model={"config": model}, training=training)
    return OpenTask(bench.config, data)


CASES = [
    ("causal_lm", LLAMA),
    ("causal_lm", BLOOM),
    ("supervised_finetuning", GPT2),
    ("sequence_classification", BERT),
    ("sequence_classification", GPT2),
]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_loss_and_validation_add_up_over_micro_batches(tmp_path, name, model):
    task = task_of(tmp_path, name, model)
    built = task.training.build_model().eval()
    rows = class_rows(6) if name == "sequence_classification" else language_rows(6)
    whole, parts = task.training.collate(rows), [task.training.collate([row]) for row in rows]

    with torch.no_grad():
        total = task.training.compute_loss(built, whole).total
        summed = sum(task.training.compute_loss(built, part).total for part in parts)
        sums = task.training.validate(built, whole)

    torch.testing.assert_close(total, summed, rtol=1e-4, atol=1e-4)
    assert task.training.weight(whole) == sum(map(task.training.weight, parts)) == sums["weight"]
    assert sums["loss"] == pytest.approx(total.item())
    assert task.training.validation_metrics(sums)[task.training.metric] == pytest.approx(
        total.item() / task.training.weight(whole)
    )


@pytest.mark.parametrize(("name", "model"), CASES)
def test_exported_model_loads_back_equal(tmp_path, name, model):
    task = task_of(tmp_path, name, model)
    built = task.training.build_model().eval()
    task.packager.export(built, tmp_path / "model")

    loaded = task.packager.load_exported(tmp_path / "model")

    for key, value in built.state_dict().items():
        assert torch.equal(value, loaded["model"].state_dict()[key])
    assert loaded["tokenizer"].get_vocab() == task.training.tokenizer.get_vocab()


WAYS = {
    "by-document": (LLAMA, {}, ""),
    "compiled": (LLAMA, {"torch_compile": True}, ""),
    "eager": ({**LLAMA, "attn_implementation": "eager"}, {}, "its attention is 'eager'"),
    "asked eager": (LLAMA, {"attention": "eager"}, "its attention is 'eager'"),
    "apart": (BLOOM, {}, "its attention is 'eager'"),
}


@pytest.mark.parametrize(("model", "training", "why"), WAYS.values(), ids=WAYS)
def test_documents_are_packed_if_attention_supports_them(tmp_path, model, training, why):
    task, rows = task_of(tmp_path, "causal_lm", model, **training), language_rows(6)
    built = task.training.build_model().eval()
    before = task.training.validate(built, task.training.collate(rows))
    remarks = task.training.ready(built)
    batch = task.training.collate(rows)
    assert ("lengths" in batch) == (not why)
    assert remarks == (
        [f"attention also computes padding and pairs across documents: {why}"] if why else []
    )
    assert task.training.validate(built, batch) == pytest.approx(before, rel=1e-6)


def test_cost_counts_tokens(tmp_path):
    task = task_of(tmp_path, "causal_lm", LLAMA)
    row = language_rows(1)[0]

    assert task.training.cost(row) == sum(row["lengths"])


def test_language_metrics_survive_a_hopeless_model(tmp_path):
    task = task_of(tmp_path, "causal_lm", LLAMA)

    metrics = task.training.validation_metrics({"loss": 1e6, "weight": 2})

    assert metrics["loss"] == 5e5
    assert math.isfinite(metrics["perplexity"])


@pytest.mark.parametrize(
    "name", sorted({*plugins.names(plugins.TASKS)} - {*TABLES, *SERIES, *MULTIMODAL})
)
def test_built_in_tasks_open(tmp_path, name):
    assert task_of(tmp_path, name, GPT2).training.metric == "loss"


def test_user_task_is_opened_by_its_address(tmp_path):
    address = "steadytrain.components.tasks.causal_lm:SupervisedFineTuning"

    assert isinstance(task_of(tmp_path, address, LLAMA).training, SupervisedFineTuning)


class OldName(SupervisedFineTuning):
    def loss(self, model, batch):
        """The name before `compute_loss`."""


def test_training_part_with_the_old_name_of_its_loss_is_rejected(tmp_path):
    with pytest.raises(BadInput, match="the method `loss` of OldName is not called") as error:
        assert task_of(tmp_path, f"{__name__}:OldName", LLAMA).training

    assert "`compute_loss`" in error.value.remedy


@pytest.mark.parametrize("name", ["no.such.module:Task", "json:Task", ":"])
def test_task_that_cannot_be_opened_is_rejected_by_name(tmp_path, name):
    with pytest.raises(BadInput, match=r"data\.task") as error:
        assert task_of(tmp_path, name, LLAMA).training

    assert "causal_lm" in error.value.remedy


def records_of(name):
    words = [" ".join(f"w{2 + (start + step) % 60}" for step in range(9)) for start in range(8)]
    columns = {
        "id": [f"{index:064d}" for index in range(8)],
        "text": words,
        "group": [None] * 8,
        "slice": ["odd", "even"] * 4,
    }
    if name == "sequence_classification":
        columns["label"] = ["a", "b"] * 4
    types = {"group": pa.string()}
    return pa.table({key: pa.array(item, types.get(key)) for key, item in columns.items()})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [CASES[0], CASES[3]])
def test_logged_model_scores_as_the_exported_one(tmp_path, monkeypatch, empty_store, name, model):
    import mlflow

    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    task, records = task_of(tmp_path, name, model), records_of(name)
    task.packager.export(task.training.build_model(), tmp_path / "model")
    mlflow.set_tracking_uri(copy_store(empty_store, tmp_path))
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment("tasks", str(tmp_path / "artifacts"))
    )
    with mlflow.start_run():
        uri = task.packager.log_model(
            tmp_path / "model", name="model", records=records, metadata={"a": "b"}
        )

    exported = task.scorer.score(task.packager.load_exported(tmp_path / "model"), records)
    logged = task.scorer.score(task.packager.load_logged(uri), records)

    assert exported["id"].to_pylist() == records["id"].to_pylist()
    assert exported["loss"].to_pylist() == pytest.approx(logged["loss"].to_pylist(), rel=1e-5)
    trivial = task.scorer.score_baseline(records)
    for name in ("id", "targets", "bytes"):
        assert trivial[name].to_pylist() == exported[name].to_pylist()
    assert all(map(math.isfinite, trivial["loss"].to_pylist()))
