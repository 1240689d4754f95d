"""Several heads in one layer learn and score as separate heads do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional

from steadytrain.components.evaluate.metric import Scores, point_values
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.tasks import criterion
from steadytrain.components.tasks.multi_task import MultiTaskClassification
from steadytrain.components.tasks.scoring import classification
from steadytrain.components.tasks.scoring.classification import MultiTaskScorer

from support.declared import assert_declared
from support.weight_digests import BERT

LABELS = ["mood/bad", "mood/good", "topic/art", "topic/law", "topic/sport"]
HEADS = {"mood": slice(0, 2), "topic": slice(2, 5)}
TARGETS = torch.tensor([0, 3, 1, 4, 2, 2, 1])


def task_of(**training):
    parts = {name: {"source": [f"{name}.jsonl"]} for name in HEADS}
    config = from_mapping(
        {
            "name": "tiny",
            "data": {"task": "multi_task", "parts": parts},
            "model": {"config": BERT},
            "training": training,
            "gate": {"max_slice_regression": 0.02},
        }
    )
    return MultiTaskClassification(config, SimpleNamespace(labels=LABELS, task="multi_task"))


class Logits(torch.nn.Module):
    """Returns the logits that are its only parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(3 * torch.randn(len(TARGETS), 5, generator=generator))

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.logits[input_ids[:, 0]])


def batch_of(rows):
    ids = torch.tensor(rows)[:, None]
    return {"input_ids": ids, "attention_mask": ids, "targets": TARGETS[rows]}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("micro", [7, 2, 1])
def test_loss_and_gradient_are_those_of_separate_heads(smoothing, micro):
    weights = {"mood": 0.5, "topic": 3.0}
    task = task_of(multi_task={"loss_weights": weights}, label_smoothing_factor=smoothing)
    model, found = Logits(), 0.0
    for start in range(0, len(TARGETS), micro):
        rows = list(range(start, min(start + micro, len(TARGETS))))
        total = task.compute_loss(model, batch_of(rows)).total
        total.backward()
        found += total.item()

    logits = model.logits.detach().double().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for part, head in HEADS.items():
        mine = (head.start <= TARGETS) & (head.stop > TARGETS)
        expected = expected + weights[part] * functional.cross_entropy(
            logits[mine][:, head],
            TARGETS[mine] - head.start,
            reduction="sum",
            label_smoothing=smoothing,
        )
    (gradient,) = torch.autograd.grad(expected, logits)
    assert found == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(model.logits.grad.double(), gradient, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_focal_loss_and_class_weights_are_those_of_separate_heads(monkeypatch, smoothing):
    """The focal loss of Lin et al. 2017, with scikit-learn's balanced weights in each part."""
    from sklearn.utils.class_weight import compute_class_weight

    counts = np.array([30, 10, 5, 0, 15])
    monkeypatch.setattr(criterion, "class_counts", lambda data: counts)
    task = task_of(
        focal_loss={"gamma": 1.5},
        class_weights={"kind": "balanced"},
        label_smoothing_factor=smoothing,
    )
    targets = torch.tensor([0, 2, 1, 4, 2, 2, 1])
    model, batch = Logits(), batch_of(list(range(7))) | {"targets": targets}
    total = task.compute_loss(model, batch).total
    total.backward()

    logits = model.logits.detach().double().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for head in HEADS.values():
        mine = (head.start <= targets) & (head.stop > targets)
        own, labels = logits[mine][:, head], targets[mine] - head.start
        examples = np.repeat(np.arange(head.stop - head.start), counts[head])
        seen = np.unique(examples)
        found = compute_class_weight("balanced", classes=seen, y=examples)
        weight = torch.zeros(head.stop - head.start, dtype=torch.float64)
        weight[seen] = torch.from_numpy(found)
        losses = functional.cross_entropy(own, labels, reduction="none", label_smoothing=smoothing)
        chances = own.softmax(1).gather(1, labels[:, None])[:, 0]
        expected = expected + (weight[labels] * (1 - chances) ** 1.5 * losses).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(model.logits.grad.double(), gradient, atol=1e-6)


class TwoPasses(Logits):
    """Returns other logits in the second half of the rows, as dropout does."""

    def __init__(self, log_variances=None):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.again = torch.nn.Parameter(3 * torch.randn(len(TARGETS), 5, generator=generator))
        self.log_variances = log_variances

    def forward(self, input_ids, attention_mask):
        first, second = input_ids[:, 0].chunk(2)
        logits = torch.cat((self.logits[first], self.again[second]))
        return SimpleNamespace(logits=logits, loss=self.log_variances)


@pytest.mark.parametrize("weighting", ["fixed", "uncertainty"])
@pytest.mark.parametrize("micro", [7, 2, 1])
def test_r_drop_compares_the_classes_of_each_part_alone(weighting, micro):
    """The loss of Liang et al. 2021, halved, of separate heads; its weight is that of the part."""
    weights, weight, smoothing = {"mood": 0.5, "topic": 3.0}, 0.8, 0.1
    learned = weighting == "uncertainty"
    how = {"loss_weighting": weighting} if learned else {"loss_weights": weights}
    task = task_of(r_drop={"weight": weight}, label_smoothing_factor=smoothing, multi_task=how)
    variances = torch.tensor([0.4, -0.7], requires_grad=True)
    model, found = TwoPasses(variances), 0.0
    for start in range(0, len(TARGETS), micro):
        rows = list(range(start, min(start + micro, len(TARGETS))))
        total = task.compute_loss(model, batch_of(rows)).total
        total.backward()
        found += total.item()

    passes = [item.detach().double().requires_grad_() for item in (model.logits, model.again)]
    exact = variances.detach().double().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for part, head in HEADS.items():
        mine = (head.start <= TARGETS) & (head.stop > TARGETS)
        labels = TARGETS[mine] - head.start
        logs = [item[mine][:, head].log_softmax(1) for item in passes]
        first, second = logs
        both = sum(
            functional.cross_entropy(item, labels, reduction="sum", label_smoothing=smoothing)
            for item in logs
        )
        apart = sum(
            functional.kl_div(one, other, reduction="sum", log_target=True)
            for one, other in ((first, second), (second, first))
        )
        loss = (both + weight * apart / 2) / 2
        if learned:
            own = exact[list(HEADS).index(part)]
            expected = expected + loss / own.exp() + int(mine.sum()) * own / 2
        else:
            expected = expected + weights[part] * loss
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip((model.logits, model.again), passes, strict=True):
        assert torch.allclose(mine.grad.double(), theirs.grad, atol=1e-6)
    if learned:
        assert torch.allclose(variances.grad.double(), exact.grad, atol=1e-5)


def test_validation_metrics_are_those_of_each_part_and_their_mean():
    task, model = task_of(), Logits()
    with torch.no_grad():
        sums = task.validate(model, batch_of([0, 1, 2]))
        for name, value in task.validate(model, batch_of([3, 4, 5, 6])).items():
            sums[name] += value
        metrics = task.validation_metrics(sums)
        for part, head in HEADS.items():
            mine = (head.start <= TARGETS) & (head.stop > TARGETS)
            logits, targets = model.logits[mine][:, head], TARGETS[mine] - head.start
            loss = functional.cross_entropy(logits, targets).item()
            right = (logits.argmax(-1) == targets).double().mean().item()
            assert metrics[f"{part}_loss"] == pytest.approx(loss, rel=1e-6)
            assert metrics[f"{part}_accuracy"] == pytest.approx(right)
    for name in ("loss", "accuracy"):
        assert metrics[name] == pytest.approx(sum(metrics[f"{part}_{name}"] for part in HEADS) / 2)


def test_part_without_validation_rows_does_not_count_in_the_mean():
    task, model = task_of(), Logits()
    metrics = task.validation_metrics(task.validate(model, batch_of([0, 2])))
    assert metrics["loss"] == metrics["mood_loss"]


def test_baseline_is_the_most_common_label_of_each_part(monkeypatch):
    monkeypatch.setattr(classification, "class_counts", lambda data: np.array([5, 1, 90, 80, 70]))
    scorer = MultiTaskScorer(None, SimpleNamespace(labels=LABELS))
    labels = ["mood/bad", "mood/good", "topic/art", "topic/law"]
    table = scorer.score_baseline(pa.table({"id": list("abcd"), "label": labels}))
    assert_declared("multi_task", table)
    assert point_values(Scores.of(table))["accuracy"] == 0.5
    assert table["part"].to_pylist() == [0, 0, 1, 1]
    np.testing.assert_allclose(table["probabilities"].to_pylist()[0], [6 / 8, 2 / 8, 0, 0, 0])
