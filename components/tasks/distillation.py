"""The loss of a student that learns from a teacher's probabilities.

From Hinton et al. 2015, "Distilling the Knowledge in a Neural Network": softened probabilities,
and the factor temperature squared, which keeps the gradient's size independent of the temperature.
The reverse divergence is from Gu et al. 2023, "MiniLLM".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from steadytrain.components.shared.config import DistillationConfig
from steadytrain.components.tasks.chunks import comparison_rows
from steadytrain.components.tasks.hidden_states import Comparison
from steadytrain.components.tasks.stored_answers import TopAnswers


@dataclass(frozen=True)
class Teaching:
    """What a teacher says about a micro-batch.

    logits: returns its logits (chosen, vocabulary) for some of the rows, given their indices; or
        what is stored of them.
    comparison: of hidden states; None without one.
    """

    logits: Callable[[torch.Tensor], torch.Tensor | TopAnswers]
    settings: DistillationConfig
    comparison: Comparison | None = None


def taught_loss(
    logits: torch.Tensor, targets: torch.Tensor, teaching: Teaching, smoothing: float = 0.0
) -> torch.Tensor:
    """Return the loss of complete logits, summed over the rows, in nats.

    Args:
        logits: (rows, vocabulary), float32.
        targets: (rows), int64, each a token.
        smoothing: of the targets, as in `fused_loss.summed_loss`.

    Returns:
        A scalar, float32, differentiable once.
    """
    loss: torch.Tensor = _TaughtLoss.apply(logits, targets, teaching, smoothing)
    return loss


class _TaughtLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        teaching: Teaching,
        smoothing: float,
    ) -> torch.Tensor:
        rows = torch.arange(len(targets), device=targets.device)
        gradient = logits.clone()
        loss = turn_into_gradient(gradient, targets.unsqueeze(1), rows, teaching, smoothing)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None, None


def turn_into_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    teaching: Teaching,
    smoothing: float,
) -> torch.Tensor:
    """Replace a student's logits by the gradient of their loss. Return the summed loss.

    Args:
        logits: (rows, vocabulary), overwritten.
        targets: (rows, 1), int64.
        rows: their indices for `Teaching.logits`.
    """
    loss = torch.zeros((), device=logits.device)
    size = comparison_rows(logits.shape[1])
    for start in range(0, logits.shape[0], size):
        place = slice(start, start + size)
        teacher = teaching.logits(rows[place])
        found, gradient = _compared(
            logits[place].float(), targets[place], teacher, teaching.settings, smoothing
        )
        loss += found
        logits[place] = gradient.to(logits.dtype)
    return loss


def _compared(
    student: torch.Tensor,
    targets: torch.Tensor,
    teacher: torch.Tensor | TopAnswers,
    settings: DistillationConfig,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a block of rows and its gradient, (rows, vocabulary)."""
    heat, share = settings.temperature, settings.weight
    own = (student / heat).log_softmax(1)
    if isinstance(teacher, TopAnswers):
        other = teacher.completed(own)
    else:
        other = (teacher.float() / heat).log_softmax(1)
    if settings.divergence == "forward":
        given = other.exp()
        loss = (given * (other - own)).sum()
        gradient = own.exp().sub_(given)
    else:
        chances, difference = own.exp(), own - other
        each = (chances * difference).sum(1, keepdim=True)
        loss, gradient = each.sum(), chances.mul_(difference.sub_(each))
    loss, gradient = loss * (share * heat**2), gradient.mul_(share * heat)
    if share < 1:
        plain = student.log_softmax(1)
        hit = torch.lerp(plain.gather(1, targets), plain.mean(1, keepdim=True), smoothing)
        loss -= (1 - share) * hit.sum()
        errors = plain.exp_().sub_(smoothing / plain.shape[1])
        errors.scatter_add_(1, targets, errors.new_full(targets.shape, smoothing - 1))
        gradient.add_(errors, alpha=1 - share)
    return loss, gradient
