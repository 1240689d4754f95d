"""Stored answers of a teacher: their loss and gradients, against plain double-precision ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from steadytrain.components.tasks import fused_loss
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.distillation import loss as distillation
from steadytrain.components.techniques.distillation.loss import (
    COLUMNS,
    Teaching,
    answers_in,
    collate_answers,
    taught_loss,
    top_answers,
)

ROWS, WORDS, WIDTH = 13, 23, 8
DIVERGENCES = pytest.mark.parametrize("divergence", ["forward", "reverse"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda vocabulary: 5)
    monkeypatch.setattr(distillation, "comparison_rows", lambda vocabulary: 2)


def settings(**fields):
    return DistillationConfig(**{"teacher": "somewhere", "top_k": 5, **fields})


def joined(logits, chosen):
    """Return the log-probabilities of the chosen words, and of all others as one word."""
    found = logits.log_softmax(-1)
    others = found.exp().scatter(1, chosen, 0.0).sum(1, keepdim=True).log()
    return torch.cat([found.gather(1, chosen), others], 1)


def plain(student, teacher, targets, config):
    """Return the loss with the teacher's other words as one, in the precision of its arguments."""
    heat, kept = config.temperature, targets != IGNORED
    chosen = teacher[kept].topk(config.top_k).indices
    own, other = (joined(logits[kept] / heat, chosen) for logits in (student, teacher))
    first, second = (own, other) if config.divergence == "forward" else (other, own)
    taught = functional.kl_div(first, second, reduction="sum", log_target=True) * heat**2
    hard = functional.cross_entropy(student[kept], targets[kept], reduction="sum")
    return config.weight * taught + (1 - config.weight) * hard


def stored(teacher, targets, config):
    """Return the answers to the rows with a target, as training reads them from two data rows."""
    top = top_answers(teacher[targets != IGNORED], config.top_k, config.temperature)
    whole = (top.classes, top.likely, top.rest)
    rows = [
        {name: part[place].flatten().numpy() for name, part in zip(COLUMNS, whole, strict=True)}
        for place in (slice(4), slice(4, None))
    ]
    batch = {"targets": targets.view(1, -1), **collate_answers(rows)}
    return Teaching(answers_in(batch, IGNORED), config)


def drawn():
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(ROWS, WORDS, dtype=torch.float64)
    targets = torch.randint(0, WORDS, (ROWS,))
    targets[::4] = IGNORED
    return hidden, weight, teacher, targets


@DIVERGENCES
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_loss_and_its_gradients_equal_the_plain_ones(divergence, share):
    hidden, weight, teacher, targets = drawn()
    config = settings(divergence=divergence, weight=share, temperature=3.0)
    expected = plain(hidden @ weight.T, teacher, targets, config)
    ours = [item.detach().float().requires_grad_() for item in (hidden, weight)]
    found = summed_loss(*ours, None, targets, 0.0, stored(teacher, targets, config))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(found, ours),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@DIVERGENCES
def test_complete_logits_get_the_gradient_of_finite_differences(divergence):
    _, _, teacher, _ = drawn()
    targets = torch.randint(0, WORDS, (ROWS,))
    config = settings(divergence=divergence, temperature=0.7)
    logits = torch.randn(ROWS, WORDS, dtype=torch.float64)
    ours = logits.float().requires_grad_()
    taught_loss(ours, targets, stored(teacher, targets, config)).backward()
    step, direction = 1e-5, torch.randn_like(logits)
    ahead, behind = (
        plain(logits + sign * step * direction, teacher, targets, config) for sign in (1, -1)
    )
    slope = (ours.grad.double() * direction).sum()
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-4)


def learned_from(teaching, targets):
    torch.manual_seed(1)
    logits = torch.randn(ROWS, WORDS, requires_grad=True)
    loss = taught_loss(logits, targets, teaching)
    loss.backward()
    return loss.detach(), logits.grad


@DIVERGENCES
def test_with_all_words_stored_the_loss_is_that_of_the_teacher_itself(divergence):
    _, _, teacher, _ = drawn()
    targets = torch.randint(0, WORDS, (ROWS,))
    config = settings(divergence=divergence, temperature=3.0, top_k=WORDS)
    online = learned_from(Teaching(lambda rows: teacher[rows].float(), config), targets)
    found = learned_from(stored(teacher, targets, config), targets)
    torch.testing.assert_close(found, online, rtol=1e-5, atol=1e-6)


@DIVERGENCES
def test_fewer_stored_words_never_cost_more(divergence):
    """Joining classes lowers a divergence: the log sum inequality."""
    _, _, teacher, _ = drawn()
    targets = torch.zeros(ROWS, dtype=torch.int64)
    losses = [
        learned_from(
            stored(teacher, targets, settings(divergence=divergence, weight=1.0, top_k=top_k)),
            targets,
        )[0].item()
        for top_k in (1, 4, 12, WORDS)
    ]
    assert losses[0] > 0
    assert losses == sorted(set(losses))


@DIVERGENCES
def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_it(divergence):
    logits = torch.randn(ROWS, WORDS, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.int64)
    config = settings(weight=1.0, divergence=divergence)
    loss = taught_loss(logits, targets, stored(logits.detach(), targets, config))
    loss.backward()
    assert loss.abs() < 1e-4
    assert logits.grad.abs().max() < 1e-6


@DIVERGENCES
def test_words_that_a_teacher_rules_out_leave_the_loss_finite(divergence):
    teacher = torch.full((ROWS, WORDS), -torch.inf)
    teacher[:, :5] = 0.0
    targets = torch.zeros(ROWS, dtype=torch.int64)
    config = settings(divergence=divergence)
    loss, gradient = learned_from(stored(teacher, targets, config), targets)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_rows_without_a_target_need_no_answer():
    rows = [{name: torch.empty(0).numpy() for name in COLUMNS}]
    assert len(collate_answers(rows)[COLUMNS[2]]) == 0
    assert collate_answers([{"input_ids": [1]}]) == {}
