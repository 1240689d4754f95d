"""The in-batch loss equals the formula in double precision, and that of sentence-transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from steadytrain.components.techniques.contrastive_texts.loss import (
    compare,
    excluded_negatives,
    numbered,
)

PAIRS = {
    "distinct": [("a", "b"), ("c", "d"), ("e", "f")],
    "one text twice": [("a", "b"), ("a", "c"), ("d", "e")],
    "one counterpart twice": [("a", "b"), ("c", "b"), ("d", "e")],
    "a text that is a counterpart": [("a", "b"), ("c", "a"), ("d", "e")],
    "single texts": [("a", "a"), ("b", "b"), ("a", "a")],
    "alone": [("a", "b")],
}


def no_negatives(pairs):
    """Return (row, candidate) for each candidate that is no negative of the row."""
    return {
        (row, other)
        for row, (text, own) in enumerate(pairs)
        for other, (their, candidate) in enumerate(pairs)
        if candidate in (text, own) or their == text
    }


def plain(texts, counterparts, pairs, temperature, smoothing=0.0):
    """Return the summed loss with loops over rows and candidates."""
    total, left_out = texts.new_zeros(()), no_negatives(pairs)
    for row in range(len(pairs)):
        kept = [row, *(one for one in range(len(pairs)) if (row, one) not in left_out)]
        scores = torch.stack(
            [
                functional.cosine_similarity(texts[row], counterparts[one], dim=0) / temperature
                for one in kept
            ]
        )
        chances = scores - scores.exp().sum().log()
        total = total - (1 - smoothing) * chances[0] - smoothing * chances.mean()
    return total


def same_of(pairs):
    first, second = zip(*pairs, strict=True)
    numbers = numbered([*first, *second]).chunk(2)
    return excluded_negatives(*numbers, *numbers)


@pytest.mark.parametrize("name", PAIRS)
def test_duplicates_are_no_negatives(name):
    found = same_of(PAIRS[name]).nonzero().tolist()
    assert set(map(tuple, found)) == no_negatives(PAIRS[name])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", PAIRS)
def test_loss_and_gradient_equal_the_plain_ones(name, smoothing):
    torch.manual_seed(0)
    pairs = PAIRS[name]
    exact = torch.randn(2 * len(pairs), 6, dtype=torch.float64, requires_grad=True)
    ours = exact.detach().float().requires_grad_()
    expected = plain(*exact.chunk(2), pairs, 0.2, smoothing) + 0 * exact.sum()
    texts, own = ours.chunk(2)
    found = compare(texts, own, own, same_of(pairs)).losses(0.2, smoothing).sum()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (theirs,) = torch.autograd.grad(expected, exact)
    (mine,) = torch.autograd.grad(found, ours)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_loss_is_the_multiple_negatives_ranking_loss():
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    texts, own = torch.randn(2, 5, 8).unbind()
    theirs = losses.MultipleNegativesRankingLoss(model=None, scale=20.0)
    expected = theirs.compute_loss_from_embeddings([texts, own], labels=None)
    found = compare(texts, own, own, torch.eye(5, dtype=torch.bool)).losses(0.05)
    torch.testing.assert_close(found.mean(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_the_precision(dtype):
    texts, own = torch.randn(2, 6, 8).unbind()
    same = torch.eye(6, dtype=torch.bool)
    with torch.autocast("cpu", dtype):
        found = compare(texts, own, own, same).losses(0.01)
    assert found.equal(compare(texts, own, own, same).losses(0.01))


def test_ranks_count_the_more_similar_negatives_and_ties():
    texts = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    own = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    found = compare(texts, own, own, torch.eye(3, dtype=torch.bool))
    assert found.ranks().tolist() == [2, 3, 3]
