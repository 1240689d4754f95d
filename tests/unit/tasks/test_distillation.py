"""The distillation loss equals a plain double-precision computation, in chunks and with padding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from steadytrain.components.tasks import fused_loss
from steadytrain.components.tasks.fused_loss import summed_loss
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.distillation import loss as distillation
from steadytrain.components.techniques.distillation.loss import Teaching, taught_loss

ROWS, WORDS, WIDTH = 13, 23, 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fused_loss, "chunk_rows", lambda vocabulary: 5)
    monkeypatch.setattr(distillation, "comparison_rows", lambda vocabulary: 2)


def settings(**fields):
    return DistillationConfig(teacher="somewhere", **fields)


def plain(student, teacher, targets, config, smoothing=0.0):
    """Return the loss as the papers write it, in the precision of its arguments."""
    heat, kept = config.temperature, targets != IGNORED
    student, teacher = student[kept], teacher[kept]
    own, other = (functional.log_softmax(logits / heat, dim=-1) for logits in (student, teacher))
    first, second = (own, other) if config.divergence == "forward" else (other, own)
    taught = functional.kl_div(first, second, reduction="sum", log_target=True) * heat**2
    hard = functional.cross_entropy(
        student, targets[kept], reduction="sum", label_smoothing=smoothing
    )
    return config.weight * taught + (1 - config.weight) * hard


def drawn(seed=0, **kinds):
    torch.manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(WORDS, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(ROWS, WORDS, dtype=torch.float64)
    targets = torch.randint(0, WORDS, (ROWS,))
    targets[::4] = IGNORED
    return hidden, weight, bias, teacher, targets


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_fused_loss_and_its_gradients_equal_the_plain_ones(divergence, share, smoothing):
    hidden, weight, bias, teacher, targets = drawn()
    config = settings(divergence=divergence, weight=share, temperature=3.0)
    teaching = Teaching(lambda rows: teacher[rows].float(), config)
    inputs = (hidden, weight, bias)
    expected = plain(functional.linear(*inputs), teacher, targets, config, smoothing)
    ours = [item.detach().float().requires_grad_() for item in inputs]
    found = summed_loss(*ours, targets, smoothing, teaching)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradients = zip(
        torch.autograd.grad(found / 7, ours), torch.autograd.grad(expected / 7, inputs), strict=True
    )
    for mine, theirs in gradients:
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_complete_logits_get_the_gradient_of_finite_differences(divergence):
    *_, teacher, _ = drawn()
    targets = torch.randint(0, WORDS, (ROWS,))
    config = settings(divergence=divergence, temperature=0.7)
    logits = torch.randn(ROWS, WORDS, dtype=torch.float64, requires_grad=True)
    ours = logits.detach().float().requires_grad_()
    taught_loss(ours, targets, Teaching(lambda rows: teacher[rows], config)).backward()
    step, direction = 1e-5, torch.randn_like(logits)
    with torch.no_grad():
        ahead, behind = (
            plain(logits + sign * step * direction, teacher, targets, config) for sign in (1, -1)
        )
    slope = (ours.grad.double() * direction).sum()
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-4)


def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_it():
    logits = torch.randn(ROWS, WORDS, requires_grad=True)
    teaching = Teaching(lambda rows: logits.detach()[rows], settings(weight=1.0))
    loss = taught_loss(logits, torch.zeros(ROWS, dtype=torch.int64), teaching)
    loss.backward()
    assert loss.abs() < 1e-4
    assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_tokens_that_a_teacher_rules_out_leave_the_loss_finite(divergence):
    logits = torch.randn(ROWS, WORDS, requires_grad=True)
    teacher = torch.zeros(ROWS, WORDS)
    teacher[:, 1:] = -1e4
    teaching = Teaching(lambda rows: teacher[rows], settings(divergence=divergence))
    loss = taught_loss(logits, torch.zeros(ROWS, dtype=torch.int64), teaching)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
