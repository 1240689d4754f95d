"""Regression learns as Transformers does, whatever the size of the numbers, and predicts them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tasks.base import OpenTask
from steadytrain.components.tasks.text import head_logits

from support.heads import FAMILIES
from support.training import (
    LLAMA,
    VOCABULARY,
    Bench,
    class_rows,
    events_of,
    weights_digest,
    write_data,
    write_tokenizer,
)
from support.weight_digests import BERT

NUMBERS = pa.schema([("input_ids", pa.list_(pa.int32())), ("label", pa.float64())])
STILL = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
RECIPE = {
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "max_steps": 40,
    "learning_rate": 3e-3,
    "eval_steps": 20,
    "save_steps": 20,
    "load_best_model_at_end": False,
}


def number_rows(count, *, mean=50_000.0, unit=1_000.0, seed=0):
    """Return rows whose number follows from their most frequent token."""
    rows = class_rows(count, seed=seed)
    return [
        # Some families read the end token.
        {"input_ids": [*row["input_ids"], 0], "label": mean + unit * (row["label"] - 1) + 0.25}
        for row in rows
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = number_rows(64), number_rows(16, seed=1)
    folder = tmp_path_factory.mktemp("numbers")
    return write_data(folder, *rows, task="sequence_regression", schema=NUMBERS)


def write_base(folder, fields=BERT, bias=0.0, **more):
    torch.manual_seed(0)
    given = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0, **more}
    config = AutoConfig.for_model(**{**fields, **given})
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name:
                weight.normal_(std=0.1)
            if name == "classifier.bias":
                weight.fill_(bias)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


def opened(root, data, model, **training):
    return OpenTask(Bench.make(root, data, model=model, training=training).config, data)


@torch.no_grad()
def predicted(model, task, rows):
    return head_logits(model.eval(), task.training.collate(rows))[:, 0].double().numpy()


def loaded(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def test_loss_and_gradients_are_those_of_transformers(tmp_path, data):
    task = opened(tmp_path, data, {"config": STILL}).training
    model, rows = task.build_model().train(), number_rows(7)
    assert model.config.problem_type == "regression"
    batch = task.collate(rows)
    del batch["targets"]
    numbers = np.array([row["label"] for row in rows])
    seen = np.array([row["label"] for row in number_rows(64)])
    standardized = torch.tensor((numbers - seen.mean()) / seen.std()).float()
    expected = model(**batch, labels=standardized).loss
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    parts = [task.collate(rows[:3]), task.collate(rows[3:])]
    total = sum(map(task.weight, parts))
    losses = [task.compute_loss(model, part).total / total for part in parts]
    torch.testing.assert_close(sum(losses), expected, rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_a_base_predicts_what_it_did_before(tmp_path, data, family):
    fields = {"model_type": family, **FAMILIES[family]}
    before = write_base(tmp_path / "base", fields, num_labels=1, problem_type="regression")
    task = opened(tmp_path, data, {"base": str(tmp_path / "base")})
    model, rows = task.training.build_model(), number_rows(5)
    expected = predicted(before, task, rows)
    scale = task.training.scale
    biased = family not in ("gpt2", "llama")
    assert scale.shift == pytest.approx(50_000 * biased, rel=0.01)
    assert scale.unit == pytest.approx(800 if biased else 50_000, rel=0.1)
    # 32 bits hold numbers around 50,000 in steps of 0.004.
    numbers = predicted(model, task, rows) * scale.unit + scale.shift
    assert numbers == pytest.approx(expected, abs=0.02)
    weights = {name: item.clone() for name, item in model.state_dict().items()}
    (tmp_path / "exported").mkdir()
    task.packager.export(model, tmp_path / "exported")
    assert all(item.equal(weights[name]) for name, item in model.state_dict().items())
    assert predicted(loaded(tmp_path / "exported"), task, rows) == pytest.approx(expected, abs=0.02)


def trained(root, data, model, **more):
    bench = Bench.make(root, data, model=model, training={**RECIPE, **more})
    bench.train_here()
    return bench


def explained(bench, data):
    """Return how much of the numbers plain Transformers explains with the exported model."""
    from sklearn.metrics import r2_score

    rows = number_rows(16, seed=1)
    task = OpenTask(bench.config, data)
    found = task.packager.load_exported(bench.workspace.model)["model"]
    numbers = predicted(found, task, rows)
    if not (bench.workspace.model / "adapter_config.json").exists():
        plain = predicted(loaded(bench.workspace.model), task, rows)
        assert numbers == pytest.approx(plain)
    return r2_score([row["label"] for row in rows], numbers)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [BERT, LLAMA], ids=["with a bias", "without a bias"])
def test_large_numbers_are_learned_and_a_resumed_run_is_the_same(tmp_path, data, fields):
    bench = trained(tmp_path / "whole", data, {"config": fields})
    assert explained(bench, data) > (0.8 if fields is BERT else 0.5)
    checkpoint = bench.workspace.checkpoints / "step-00000020"
    again = Bench.make(tmp_path / "again", data, model={"config": fields}, training=RECIPE)
    again.train_here(resume_from=checkpoint)
    assert weights_digest(again.workspace) == weights_digest(bench.workspace)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_adapters_predict_numbers_too(tmp_path, data, merge):
    write_base(tmp_path / "base", bias=50_000.0, num_labels=1, problem_type="regression")
    adapter = {"kind": "lora", "rank": 4, "merge": merge}
    bench = trained(tmp_path, data, {"base": str(tmp_path / "base"), "adapter": adapter})
    assert explained(bench, data) > 0.5
    if not merge:
        stored = load_file(bench.workspace.model / "adapter_model.safetensors")
        (bias,) = (item for name, item in stored.items() if name.endswith("classifier.bias"))
        assert bias.item() == pytest.approx(50_000, rel=0.1)


@pytest.mark.slow
def test_validation_metrics_are_those_of_scikit_learn(tmp_path, data):
    from scipy.stats import pearsonr
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    bench = trained(tmp_path, data, {"config": BERT}, max_steps=20)
    task, rows = OpenTask(bench.config, data), number_rows(16, seed=1)
    truth = [row["label"] for row in rows]
    found = predicted(loaded(bench.workspace.model), task, rows)
    mse = mean_squared_error(truth, found)
    variance = np.var([row["label"] for row in number_rows(64)])
    expected = {
        "loss": mse / variance,
        "mse": mse,
        "rmse": mse**0.5,
        "mae": mean_absolute_error(truth, found),
        "r2": r2_score(truth, found),
        "pearson": pearsonr(truth, found).statistic,
    }
    (event,) = events_of(bench.workspace, Validated)
    assert event.metrics == pytest.approx(expected, rel=1e-3)


def test_rows_are_graded_by_a_model_that_predicts_numbers(tmp_path, data):
    write_base(tmp_path / "base", num_labels=1, problem_type="regression")
    task = opened(tmp_path, data, {"base": str(tmp_path / "base")}).training
    task.build_model()
    reference, rows = task.load_reference(str(tmp_path / "base"), "a field"), number_rows(4)
    with torch.no_grad():
        batch = task.collate(rows)
        losses = task.row_losses(reference, batch, [1] * 4)
        plain = head_logits(reference, batch)[:, 0].double()
    apart = plain.numpy() - [row["label"] for row in rows]
    assert losses.numpy() == pytest.approx(np.square(apart / task.scale.unit), rel=1e-3)


def test_a_head_that_does_not_fit_is_new_or_an_error(tmp_path, data):
    write_base(tmp_path / "base", num_labels=3)
    task = opened(tmp_path, data, {"base": str(tmp_path / "base")}).training
    (remark,) = task.ready(task.build_model())
    assert "the head is new" in remark
    with pytest.raises(BadInput, match="it has 3 outputs"):
        task.load_reference(str(tmp_path / "base"), "model.base")


@pytest.mark.parametrize(("bias", "far"), [(0.5, True), (49_000.0, False)])
def test_a_base_that_predicts_other_numbers_gets_a_warning(tmp_path, data, bias, far):
    write_base(tmp_path / "base", bias=bias, num_labels=1, problem_type="regression")
    task = opened(tmp_path, data, {"base": str(tmp_path / "base")}).training
    remarks = task.ready(task.build_model())
    assert len(remarks) == far
    assert all("model.base begins around 0.49" in remark for remark in remarks)


def test_model_without_a_linear_head_learns_plain_numbers(tmp_path, data, monkeypatch):
    task = opened(tmp_path, data, {"config": BERT})

    def none(model):
        raise BadInput("no head", remedy="")

    monkeypatch.setattr("steadytrain.components.tasks.sequence_regression.class_head", none)
    model, rows = task.training.build_model(), number_rows(3)
    (remark,) = task.training.ready(model)
    assert "learns the numbers as they are" in remark
    targets = task.training.collate(rows)["targets"].tolist()
    assert targets == [row["label"] for row in rows]
    (tmp_path / "exported").mkdir()
    task.packager.export(model, tmp_path / "exported")
    assert predicted(loaded(tmp_path / "exported"), task, rows) == pytest.approx(
        predicted(model, task, rows)
    )


@pytest.mark.parametrize(
    ("mean", "precision", "coarse"),
    [(3.0, None, False), (3.0, "bfloat16", True), (1.7e9, None, True), (5e4, "float32", False)],
)
def test_numbers_that_the_export_would_round_get_a_warning(tmp_path, mean, precision, coarse):
    rows = number_rows(8, mean=mean, unit=1.0)
    data = write_data(tmp_path, rows, rows, task="sequence_regression", schema=NUMBERS)
    task = opened(tmp_path, data, {"config": BERT, "export_dtype": precision}).training
    remarks = task.ready(task.build_model())
    assert [remark for remark in remarks if "in steps of" in remark] == remarks
    assert bool(remarks) == coarse


def test_equal_numbers_cannot_be_learned(tmp_path):
    rows = [{**row, "label": 3.0} for row in class_rows(8)]
    data = write_data(tmp_path, rows, rows, task="sequence_regression", schema=NUMBERS)
    with pytest.raises(DataError, match="has the number 3, so that there is nothing to learn"):
        opened(tmp_path, data, {"config": BERT}).training.build_model()
