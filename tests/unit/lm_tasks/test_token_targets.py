"""Log-likelihoods in blocks of positions and tokens equal those from all logits at once."""

import pytest
import torch

from steadytrain.components.tasks.scoring.continuations import TokenTargets, judge

WORDS, PLACES = 3000, 700
"""More than one block of each."""


def targets(logits, count=2500):
    generator = torch.Generator().manual_seed(1)
    of = torch.randint(PLACES, (count,), generator=generator)
    tokens = torch.randint(WORDS, (count,), generator=generator)
    # Also ask for the likeliest token of each position, which random sampling rarely picks.
    of = torch.cat([of, torch.arange(PLACES)])
    tokens = torch.cat([tokens, logits.argmax(-1)])
    return TokenTargets(torch.arange(PLACES), of, tokens)


def by_parts(wanted, logits):
    return judge(wanted, WORDS, lambda top, end, left, right: logits[top:end, left:right].clone())


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_blocks_sum_to_the_whole(scale):
    logits = scale * torch.randn(PLACES, WORDS, generator=torch.Generator().manual_seed(0))
    wanted = targets(logits)
    nats, greedy = by_parts(wanted, logits)
    expected = logits.double().log_softmax(-1)[wanted.of, wanted.tokens]
    assert torch.allclose(nats.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(greedy, logits.argmax(-1)[wanted.of] == wanted.tokens)
    assert greedy[-PLACES:].all()


def test_ties_go_to_the_first_token():
    logits = torch.zeros(PLACES, WORDS)
    # Twice within one block, and once in another.
    logits[:, [7, 9, 2999]] = 1.0
    of = torch.arange(PLACES).repeat_interleave(3)
    wanted = TokenTargets(torch.arange(PLACES), of, torch.tensor([7, 9, 2999]).repeat(PLACES))
    _, greedy = by_parts(wanted, logits)
    assert greedy.view(PLACES, 3).tolist() == [[True, False, False]] * PLACES


def test_impossible_tokens_are_ignored():
    logits = torch.full((PLACES, WORDS), -torch.inf)
    logits[:, [1500, 2000]] = 3.0
    wanted = TokenTargets(torch.tensor([0]), torch.tensor([0, 0]), torch.tensor([1500, 4]))
    nats, greedy = by_parts(wanted, logits)
    assert nats.tolist() == [pytest.approx(-0.6931472), -torch.inf]
    assert greedy.tolist() == [True, False]
