"""Adversarial training as the papers write it, with loops, and as the training loop runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from steadytrain.components.tasks.base import Batch
from steadytrain.components.techniques.adversarial_training import (
    AdversarialConfig,
    Attack,
)
from steadytrain.components.techniques.adversarial_training.attack import Pass, adversarial_passes


def stepped(perturbation: torch.Tensor, gradient: torch.Tensor, how: Attack) -> torch.Tensor:
    """Return one projected step of each text, with loops."""
    moved = []
    for text, slope in zip(perturbation, gradient, strict=True):
        if how.norm == "linf":
            moved.append((text + how.step_size * slope.sign()).clamp(-how.epsilon, how.epsilon))
            continue
        found = text + how.step_size * slope / slope.norm()
        moved.append(found * min(1.0, how.epsilon / found.norm().item()))
    return torch.stack(moved)


def attacked_loss(
    start: torch.Tensor, how: AdversarialConfig, loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the loss that the papers learn from.

    Args:
        start: the perturbation to start from, (texts, length, width).
        loss: of perturbed texts, summed.
    """
    at, visited = start, []
    for _ in range(how.step_count if how.kind != "freelb" else how.step_count - 1):
        visited.append(at)
        leaf = at.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf), leaf)
        at = stepped(at, slope, how)
    visited = [at] if how.kind == "pgd" else [*visited, at]
    return torch.stack([loss(each) for each in visited]).mean()


def passes_of(
    model: torch.nn.Module, task: Any, batch: Batch, how: AdversarialConfig
) -> Iterator[Pass]:
    """Return the passes of a micro-batch."""
    return adversarial_passes(how, model, batch, lambda: task.compute_loss(model, batch).total)


def trained(
    model: torch.nn.Module, task: Any, batch: Batch, how: AdversarialConfig
) -> torch.Tensor:
    """Return the loss, and leave the gradients, as the training loop does."""
    total = torch.zeros(())
    for each in passes_of(model, task, batch, how):
        loss = task.compute_loss(model, batch).total * each.share
        loss.backward()
        total = total + loss.detach()
        assert each.last or each.share < 1
    return total
