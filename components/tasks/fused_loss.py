"""Cross-entropy of a language model's head without the logits of a whole micro-batch.

A chunk of rows at a time: logits, loss, and at once the gradients, which backward has only to
scale. The idea is that of Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language
Models", and of Hsu et al. 2024, "Liger Kernel", here in PyTorch's own operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from steadytrain.components.tasks.chunks import chunk_rows, product_rows
from steadytrain.components.tasks.packing import IGNORED


def summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, summed over the targets, in nats.

    Products are in the type of autocast where that is on, all else in float32.

    Args:
        hidden: (..., width). weight: (vocabulary, width). bias: (vocabulary).
        targets: (...), int64; rows whose target is IGNORED count for nothing.

    Returns:
        A scalar, float32; differentiable once.

    Raises:
        ValueError: there are not as many rows as targets.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"{tuple(hidden.shape)} has no row for each of {tuple(targets.shape)}")
    device = hidden.device.type
    # The meta device knows none.
    half = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else weight.dtype
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    if not torch.is_grad_enabled():
        return _pass(rows, weight, bias, wanted, dtype, Needs()).loss
    loss: torch.Tensor = _SummedLoss.apply(rows, weight, bias, wanted, dtype)
    return loss


@dataclass(frozen=True)
class Needs:
    """Of what gradients are wanted."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass
class _Found:
    """Loss, and gradients where they are wanted."""

    loss: torch.Tensor
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


class _SummedLoss(torch.autograd.Function):
    """Gradients are there with the loss; nothing else is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        found = _pass(hidden, weight, bias, targets, dtype, Needs(*ctx.needs_input_grad[:3]))
        ctx.gradients = (found.hidden, found.weight, found.bias)
        return found.loss

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Scaled in place, since the head's is large: a second backward would scale them twice.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the fused loss has been differentiated already")
        scaled = (None if item is None else item.mul_(outputs[0]) for item in gradients)
        return (*scaled, None, None)


def _pass(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dtype: torch.dtype,
    needs: Needs,
) -> _Found:
    """Loss and gradients, chunk by chunk.

    Args:
        hidden: (rows, width). targets: (rows).
        dtype: of the products.
    """
    kept = _kept(targets)
    rows = hidden.index_select(0, kept).to(dtype)
    wanted = targets.index_select(0, kept).unsqueeze(1)
    head = weight.to(dtype)
    found = _Found(torch.zeros((), device=hidden.device))
    if needs.hidden:
        found.hidden = torch.empty_like(rows)
    if needs.weight:
        found.weight = torch.zeros_like(weight, dtype=torch.float32)
    if bias is not None and needs.bias:
        found.bias = torch.zeros_like(bias, dtype=torch.float32)
    size = chunk_rows(weight.shape[0])
    for start in range(0, rows.shape[0], size):
        place = slice(start, start + size)
        logits = rows[place] @ head.T
        if bias is not None:
            logits += bias.to(dtype)
        errors = _loss_and_errors(logits, wanted[place], found.loss, differentiate=needs.any)
        del logits
        _add_gradients(found, errors, rows, head, place)
        del errors
    if found.hidden is not None:
        found.hidden = _spread(found.hidden, hidden, kept)
    # It waits for backward in the parameter's own type.
    found.weight = None if found.weight is None else found.weight.to(weight.dtype)
    return found


def _kept(targets: torch.Tensor) -> torch.Tensor:
    """Rows that have a target; of tensors without values, which cannot tell, all."""
    if targets.is_meta or isinstance(targets, FakeTensor):
        return torch.arange(len(targets), device=targets.device)
    return (targets != IGNORED).nonzero().squeeze(1)


def _loss_and_errors(
    logits: torch.Tensor, target: torch.Tensor, total: torch.Tensor, *, differentiate: bool
) -> torch.Tensor:
    """Adds the chunk's loss to `total`; gives the gradient of the logits.

    By maximum, exponential and sum, in place: on a CPU `logsumexp` takes ten times as long.

    Args:
        logits: (rows, vocabulary), which are overwritten. target: (rows, 1). total: scalar.
        differentiate: else what is given is not the gradient.

    Returns:
        (rows, vocabulary), float32.
    """
    values = logits.float()
    values -= values.amax(1, keepdim=True)
    hit = values.gather(1, target)
    sums = values.exp_().sum(1, keepdim=True)
    total += (sums.log() - hit).sum()
    if differentiate:
        values /= sums
        values.scatter_add_(1, target, values.new_full((), -1).expand(target.shape))
    return values


def _add_gradients(
    found: _Found, errors: torch.Tensor, rows: torch.Tensor, head: torch.Tensor, place: slice
) -> None:
    """Those of a chunk, from the gradient of its logits.

    Args:
        errors: (chunk, vocabulary), float32. rows: (rows, width). place: of the chunk's rows.
    """
    if found.bias is not None:
        found.bias += errors.sum(0)
    errors = errors.to(rows.dtype)
    if found.hidden is not None:
        torch.mm(errors, head, out=found.hidden[place])
    if found.weight is not None:
        _add_product(found.weight, errors.T, rows[place])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds `left @ right` to `total`, which is float32.

    Of 16 bits some rows at a time: the whole product would be half as large as the sum.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    size = product_rows(total.shape[1])
    for start in range(0, total.shape[0], size):
        total[start : start + size] += left[start : start + size] @ right


def _spread(gradient: torch.Tensor, hidden: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The gradient of all rows from that of the rows that are kept."""
    spread = torch.zeros_like(hidden)
    return spread.index_copy_(0, kept, gradient.to(hidden.dtype))
