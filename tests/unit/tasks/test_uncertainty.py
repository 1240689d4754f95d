"""Learned loss weights, compared with the paper's formula and with finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForSequenceClassification

from steadytrain.components.memory.groups import treatments
from steadytrain.components.memory.model import model_groups
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.tasks.frozen_parts import parameter_count
from steadytrain.components.tasks.multi_task import MultiTaskClassification
from steadytrain.components.tasks.text import head_output
from steadytrain.components.techniques.multi_task.weights import uncertain_loss

from support.training import VOCABULARY
from support.weight_digests import BERT

LABELS = ["mood/bad", "mood/good", "topic/art", "topic/law", "topic/sport"]
HEADS = {"mood": slice(0, 2), "topic": slice(2, 5)}
TARGETS = torch.tensor([0, 3, 1, 4, 2, 2, 1])


@pytest.fixture
def task():
    class Data:
        labels = LABELS

    parts = {name: {"source": [f"{name}.jsonl"]} for name in HEADS}
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"task": "multi_task", "parts": parts},
            "model": {"config": BERT},
            "training": {"multi_task": {"loss_weighting": "uncertainty"}},
            "gate": {"max_slice_regression": 0.02},
        }
    )
    return MultiTaskClassification(config, Data())


@pytest.fixture
def model(task):
    torch.manual_seed(0)
    fields = {**BERT, "vocab_size": VOCABULARY, "num_labels": len(LABELS)}
    made = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields)).eval()
    task.extend(made)
    with torch.no_grad():
        made.uncertainty.log_variances.copy_(torch.tensor([0.4, -0.7]))
    return made


def batch_of(rows):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (len(TARGETS), 6), generator=generator)[rows]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "targets": TARGETS[rows]}


@pytest.mark.parametrize("micro", [7, 2, 1])
def test_loss_and_gradients_are_those_of_the_paper(task, model, micro):
    """Equation 10 for each row: its cross-entropy / sigma ** 2 + log(sigma) of its part."""
    found = 0.0
    for start in range(0, len(TARGETS), micro):
        rows = list(range(start, min(start + micro, len(TARGETS))))
        total = task.compute_loss(model, batch_of(rows)).total
        total.backward()
        found += total.item()

    logits = head_output(model, batch_of(list(range(len(TARGETS))))).logits.detach().double()
    expected, gradient = 0.0, []
    for head, variance in zip(HEADS.values(), [math.exp(0.4), math.exp(-0.7)], strict=True):
        mine = (head.start <= TARGETS) & (head.stop > TARGETS)
        loss = functional.cross_entropy(
            logits[mine][:, head], TARGETS[mine] - head.start, reduction="sum"
        ).item()
        count = int(mine.sum())
        expected += loss / variance + count * math.log(math.sqrt(variance))
        gradient.append(count / 2 - loss / variance)
    assert found == pytest.approx(expected, rel=1e-5)
    assert model.uncertainty.log_variances.grad.tolist() == pytest.approx(gradient, rel=1e-5)


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(6, generator=generator, dtype=torch.float64, requires_grad=True)
    tasks = torch.tensor([0, 2, 1, 0, 2, 2])
    values = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda losses, values: uncertain_loss(losses, tasks, values), (losses, values)
    )


def test_learned_weights_are_validation_metrics(task, model):
    with torch.no_grad():
        sums = task.validate(model, batch_of([0, 2]))
        for name, value in task.validate(model, batch_of([1, 3, 4])).items():
            sums[name] += value
    metrics = task.validation_metrics(sums)
    assert metrics["mood_loss_weight"] == pytest.approx(math.exp(-0.4))
    assert metrics["topic_loss_weight"] == pytest.approx(math.exp(0.7))
    assert metrics["loss"] == pytest.approx((metrics["mood_loss"] + metrics["topic_loss"]) / 2)


def test_export_and_parameter_count_leave_the_weights_out(tmp_path, task, model):
    plain = AutoModelForSequenceClassification.from_config(model.config)
    assert parameter_count(model) == parameter_count(plain)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    batch = batch_of([0, 1])
    assert head_output(loaded.eval(), batch).logits.equal(head_output(model, batch).logits)


def test_weight_decay_does_not_apply(task, model):
    training = task.config.training.model_copy(update={"weight_decay": 0.1})
    found = treatments(model, training)
    assert found["uncertainty.log_variances"].weight_decay == 0
    assert found["classifier.weight"].weight_decay == 0.1


def test_plans_know_the_weights_as_a_parameter_group(task):
    groups = [{"match": "log_variances", "lr_scale": 100}]
    content = task.config.model_dump(mode="json", exclude_unset=True)
    content["training"]["param_groups"] = groups
    content["model"]["config"]["vocab_size"] = VOCABULARY
    found = model_groups(from_mapping(content))
    assert {group.lr_scale: group.parameters for group in found}[100] == len(HEADS)
