"""The contrastive loss equals the paper's formula in double precision, document by document."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from steadytrain.components.tasks.documents import collate_documents, collate_packed, collate_rows
from steadytrain.components.techniques.contrastive_tokens import ContrastiveConfig
from steadytrain.components.techniques.contrastive_tokens import loss as contrastive_tokens
from steadytrain.components.techniques.contrastive_tokens.loss import (
    Span,
    document_spans,
    similarity_loss,
)

from support.training import packed_row

WIDTH = 6
SPANS = [Span(0, 7, 5), Span(9, 11, 1)]
"""Tokens 7, 8 and 11 belong to no document with a target."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(contrastive_tokens, "similarity_rows", lambda length: 3)


def settings(**fields):
    return ContrastiveConfig(weight=1.0, **fields)


def plain(hidden, spans, config):
    """Return the loss as the paper writes it (section 3.2), with a loop over the pairs."""
    total = hidden.new_zeros(())
    for span in spans:
        states = hidden[span.start : span.end]
        pairs = [(i, j) for i in range(len(states)) for j in range(len(states)) if i != j]
        for i, j in pairs:
            similar = functional.cosine_similarity(states[i], states[j], dim=0)
            excess = config.margin - 1 + similar
            if config.temperature:
                value = functional.softplus(excess / config.temperature) * config.temperature
            else:
                value = excess.clamp_min(0)
            total = total + value * span.targets / len(pairs)
    return total


@pytest.mark.parametrize("temperature", [0.0, 0.2])
@pytest.mark.parametrize("margin", [0.5, 1.5])
def test_loss_and_gradient_equal_the_plain_ones(margin, temperature):
    torch.manual_seed(0)
    exact = torch.randn(12, WIDTH, dtype=torch.float64, requires_grad=True)
    ours = exact.detach().float().requires_grad_()
    config = settings(margin=margin, temperature=temperature)
    expected, found = plain(exact, SPANS, config), similarity_loss(ours, SPANS, config)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (theirs,) = torch.autograd.grad(expected, exact)
    (mine,) = torch.autograd.grad(found, ours)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)
    assert not mine[7:9].any()
    assert not mine[11:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_states_in_half_precision_of_any_size_give_finite_numbers(dtype, size):
    torch.manual_seed(0)
    hidden = (size * torch.randn(12, WIDTH)).clamp(-6e4, 6e4).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = similarity_loss(hidden, SPANS, settings())
    loss.backward()
    expected = plain(hidden.detach().double(), SPANS, settings())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    assert hidden.grad.isfinite().all()


def test_equal_and_zero_states_give_finite_gradients():
    hidden = torch.zeros(12, WIDTH)
    hidden[:4] = 1.0
    hidden.requires_grad_()
    similarity_loss(hidden, SPANS, settings()).backward()
    assert hidden.grad.isfinite().all()


def test_every_layout_has_the_same_documents():
    generator = np.random.default_rng(0)
    rows = [packed_row(lengths, generator) for lengths in ([5, 2], [3], [1, 4, 6])]
    expected = [(5, 4), (2, 1), (3, 2), (4, 3), (6, 5)]
    for batch in (collate_packed(rows), collate_rows(rows, 1), collate_documents(rows, 1)):
        spans = document_spans(batch)
        assert [(span.end - span.start, span.targets) for span in spans] == expected
        ids = batch["input_ids"].flatten()
        for span in spans:
            # Each document counts upward, so no span crosses a border.
            steps = set(ids[span.start : span.end].diff().tolist())
            assert steps <= {1, 1 - 62}
