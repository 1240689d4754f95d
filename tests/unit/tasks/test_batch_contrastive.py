"""The supervised contrastive loss equals the paper's formula in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from steadytrain.components.techniques.contrastive_texts.loss import (
    pooled,
    supervised_contrastive_loss,
)


def plain(rows, labels, temperature):
    """Return equation 2 of Khosla et al. 2020, with loops over anchors and positives."""
    total = rows.new_zeros(())
    for anchor in range(len(rows)):
        others = [other for other in range(len(rows)) if other != anchor]
        similar = {
            other: functional.cosine_similarity(rows[anchor], rows[other], dim=0) / temperature
            for other in others
        }
        positives = [other for other in others if labels[other] == labels[anchor]]
        for positive in positives:
            below = torch.stack([similar[other].exp() for other in others]).sum().log()
            total = total + (below - similar[positive]) / len(positives)
    return total


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 1, 2], [0, 1], [0, 0], [3]])
def test_loss_and_gradient_equal_the_plain_ones(labels):
    torch.manual_seed(0)
    labels = torch.tensor(labels)
    exact = torch.randn(len(labels), 6, dtype=torch.float64, requires_grad=True)
    ours = exact.detach().float().requires_grad_()
    expected = plain(exact, labels, 0.2) + 0 * exact.sum()
    found = supervised_contrastive_loss(ours, labels, 0.2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (theirs,) = torch.autograd.grad(expected, exact)
    (mine,) = torch.autograd.grad(found, ours)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_the_precision(dtype):
    rows, labels = torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 1, 2])
    with torch.autocast("cpu", dtype):
        found = supervised_contrastive_loss(rows, labels, 0.05)
    assert found.equal(supervised_contrastive_loss(rows, labels, 0.05))


def test_padding_does_not_change_a_rows_mean():
    states = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = pooled(states, mask)
    torch.testing.assert_close(found[0], states[0, :3].mean(0))
    torch.testing.assert_close(found[1], states[1].mean(0))
