"""Perturbations of the embeddings of a micro-batch that raise its loss.

One step along the gradient is the fast gradient method (Goodfellow et al. 2015; on texts Miyato et
al. 2017), several projected ones are projected gradient descent (Madry et al. 2018). Perturbations
start at zero, so they depend on nothing but the model and the text: neither on the size of the
micro-batch nor on the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from steadytrain.components.shared.config.adversarial import Attack
from steadytrain.components.tasks.base import Batch

_SHORTEST: Final = 1e-30
"""Norm of a gradient below which it has no direction."""


def unperturbed(model: Any, batch: Batch) -> torch.Tensor:
    """Return the perturbation to start from: zeros, (rows, length, width), float32."""
    ids, width = batch["input_ids"], model.get_input_embeddings().embedding_dim
    return torch.zeros((*ids.shape, width), device=ids.device, requires_grad=True)


@contextlib.contextmanager
def perturbed(model: Any, perturbation: torch.Tensor) -> Iterator[None]:
    """Add a perturbation to the token embeddings of every forward pass within this context."""

    def add(_: object, __: object, found: torch.Tensor) -> torch.Tensor:
        return found + perturbation.to(found.dtype)

    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def ascended(perturbation: torch.Tensor, gradient: torch.Tensor, attack: Attack) -> torch.Tensor:
    """Return the perturbation after one step, within the ball of radius epsilon.

    Args:
        gradient: of the loss, times any positive factor. A text whose gradient is zero or not
            finite keeps its perturbation.

    Returns:
        A leaf that requires a gradient.
    """
    inner = (1, 2)
    if attack.norm == "linf":
        direction = gradient.sign()
        moved = (perturbation + attack.step_size * direction).clamp(-attack.epsilon, attack.epsilon)
    else:
        # Normalized first by the largest value, because squares of small ones underflow.
        scaled = gradient / gradient.abs().amax(inner, keepdim=True).clamp_min(_SHORTEST)
        direction = scaled / scaled.norm(dim=inner, keepdim=True).clamp_min(_SHORTEST)
        moved = perturbation + attack.step_size * direction
        norms = moved.norm(dim=inner, keepdim=True)
        moved = moved * (attack.epsilon / norms.clamp_min(attack.epsilon))
    found = torch.where(moved.isfinite().all(inner, keepdim=True), moved, perturbation)
    return found.requires_grad_()


def search(
    model: Any, batch: Batch, attack: Attack, loss: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the perturbation after all steps.

    Args:
        loss: runs the forward pass. The gradients of weights stay as they are.
    """
    perturbation = unperturbed(model, batch)
    for _ in range(attack.step_count):
        with perturbed(model, perturbation):
            (gradient,) = torch.autograd.grad(loss(), perturbation)
        perturbation = ascended(perturbation, gradient, attack)
    return perturbation
