"""Focal loss, class weights and R-Drop equal plain double-precision computations and libraries."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from pytorch_optimizer import FocalLoss
from torch.nn import functional

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks import criterion, fused_loss
from steadytrain.components.tasks.criterion import Criterion
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.tasks.scoring.table import class_counts
from steadytrain.components.tasks.text import check_drops
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.r_drop.passes import in_pairs, twice
from steadytrain.components.techniques.rare_classes import ClassWeightsConfig
from steadytrain.components.techniques.rare_classes.weights import class_weights

from support.training import CLASSES, class_rows, write_data

ROWS, WORDS, WIDTH = 14, 23, 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda vocabulary: 5)
    monkeypatch.setattr(criterion, "comparison_rows", lambda vocabulary: 3)


def plain(logits, targets, how):
    """Return the loss as the papers write it; rows of two passes are in two halves."""
    total = logits.new_zeros(())
    for row, target in zip(logits, targets.tolist(), strict=True):
        chances = row.softmax(0)
        spread = how.smoothing / len(row)
        wanted = torch.full_like(row, spread)
        wanted[target] += 1 - how.smoothing
        weight = 1.0 if how.weights is None else how.weights[target].double()
        modulated = (1 - chances[target]) ** how.gamma * -(wanted * chances.log()).sum()
        total = total + weight * modulated
    if how.r_drop:
        first, second = (half.softmax(1) for half in logits.chunk(2))
        forward = (first * (first / second).log()).sum()
        backward = (second * (second / first).log()).sum()
        total = (total + how.r_drop * (forward + backward) / 2) / 2
    return total


CASES = [
    Criterion(gamma=2.0),
    Criterion(gamma=0.5, smoothing=0.1),
    Criterion(r_drop=5.0),
    Criterion(r_drop=0.7, gamma=2.0, smoothing=0.1),
    Criterion(weights=torch.linspace(0.5, 2, WORDS)),
    Criterion(weights=torch.linspace(0.5, 2, WORDS), gamma=1.5, r_drop=1.0),
]


def drawn():
    torch.manual_seed(0)
    inputs = [torch.randn(ROWS, WIDTH), torch.randn(WORDS, WIDTH), torch.randn(WORDS)]
    targets = torch.randint(0, WORDS, (ROWS // 2,))
    targets[::3] = IGNORED
    exact = [item.double().requires_grad_() for item in inputs]
    return exact, [item.requires_grad_() for item in inputs], targets.repeat(2)


@pytest.mark.parametrize("how", CASES, ids=repr)
def test_the_fused_loss_and_its_gradients_equal_the_plain_ones(how):
    exact, ours, targets = drawn()
    kept = targets != IGNORED
    expected = plain(functional.linear(*exact)[kept], targets[kept], how)
    found = summed_loss(*ours, targets, criterion=how)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = zip(
        torch.autograd.grad(found / 7, ours), torch.autograd.grad(expected / 7, exact), strict=True
    )
    for mine, theirs in gradients:
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", CASES, ids=repr)
def test_complete_logits_get_the_gradient_of_finite_differences(how):
    torch.manual_seed(1)
    logits, targets = 3 * torch.randn(ROWS, WORDS), torch.randint(0, WORDS, (ROWS // 2,)).repeat(2)
    order = in_pairs if how.r_drop else lambda rows: rows
    ours = logits.clone().requires_grad_()
    how(order(ours), order(targets)).backward()
    step, direction = 1e-5, torch.randn(logits.shape, dtype=torch.float64)
    ahead, behind = (
        plain(logits.double() + sign * step * direction, targets, how) for sign in (1, -1)
    )
    slope = (ours.grad.double() * direction).sum()
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-4)


def test_focal_loss_of_two_classes_equals_that_of_a_library():
    torch.manual_seed(0)
    scores, targets = 3 * torch.randn(50), torch.randint(0, 2, (50,))
    logits = torch.stack([torch.zeros(50), scores], 1)
    theirs = FocalLoss(alpha=1.0, gamma=2.0)(scores, targets.float())
    torch.testing.assert_close(Criterion(gamma=2.0)(logits, targets) / 50, theirs)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_certain_prediction_has_a_finite_gradient(gamma):
    logits = torch.tensor([[200.0, 0.0], [-200.0, 0.0]], requires_grad=True)
    loss = Criterion(gamma=gamma)(logits, torch.tensor([0, 0]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_equal_passes_have_the_loss_of_one_pass():
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 4), torch.randint(0, 4, (6,))
    both = Criterion(r_drop=3.0)(in_pairs(logits.repeat(2, 1)), in_pairs(targets.repeat(2)))
    torch.testing.assert_close(both, Criterion()(logits, targets))


@pytest.mark.parametrize("how", CASES[:4], ids=repr)
def test_the_loss_of_a_micro_batch_is_the_sum_over_its_parts(how):
    torch.manual_seed(0)
    logits, targets = torch.randn(12, 5), torch.randint(0, 5, (6,)).repeat_interleave(2)
    parts = how(logits[:4], targets[:4]) + how(logits[4:], targets[4:])
    torch.testing.assert_close(how(logits, targets), parts)


def test_two_passes_of_packed_documents_follow_each_other():
    batch = {"input_ids": torch.arange(5)[None], "lengths": [2, 3]}
    doubled = twice(batch)
    assert doubled["input_ids"].tolist() == [[0, 1, 2, 3, 4] * 2]
    assert doubled["lengths"] == [2, 3, 2, 3]
    assert twice({"input_ids": torch.zeros(2, 3)})["input_ids"].shape == (4, 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(
        tmp_path_factory.mktemp("data"),
        class_rows(31),
        [],
        task="sequence_classification",
        schema=CLASSES,
        labels=["a", "b", "c"],
        tokenizer=False,
    )


def test_balanced_weights_are_those_of_scikit_learn(data):
    from sklearn.utils.class_weight import compute_class_weight

    labels = [row["label"] for row in class_rows(31)]
    theirs = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    ours = class_weights(
        ClassWeightsConfig(kind="balanced"), data.labels, partial(class_counts, data)
    )
    torch.testing.assert_close(ours, torch.from_numpy(theirs).float())


def test_given_weights_are_in_the_order_of_the_labels(data):
    given = ClassWeightsConfig(kind="given", given={"c": 3.0, "a": 1.0, "b": 0.5})
    assert class_weights(given, data.labels, partial(class_counts, data)).tolist() == [
        1.0,
        0.5,
        3.0,
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [({"a": 1.0, "b": 1.0}, "'c' has no weight"), ({"d": 1.0}, "'d' is not a label")],
)
def test_weights_of_other_labels_are_rejected(data, given, problem):
    with pytest.raises(BadInput, match=problem):
        ClassWeightsConfig(kind="given", given=given).check_labels(data.labels)


def test_a_model_without_dropout_is_rejected():
    still = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    with pytest.raises(BadInput, match=r"r_drop\.weight = 1\.0: the model has no dropout"):
        check_drops(still, "training.r_drop.weight", 1.0)
    check_drops(torch.nn.Sequential(torch.nn.Dropout(0.1)), "training.r_drop.weight", 1.0)
