"""A loss of whole documents' log-likelihoods, without the logits of a full micro-batch.

What a token's gradient is multiplied by depends on all tokens of its document, so the head runs
twice over the chunks: first for the likelihoods, then for the gradients. Both happen in the forward
pass, where FSDP and ZeRO-3 have gathered the head's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steadytrain.components.shared.chunks import chunk_rows, comparison_rows
from steadytrain.components.tasks.fused_loss import (
    ForwardGradients,
    LossAndGradients,
    add_gradients,
    head_logits,
    rows_with_target,
)
from steadytrain.components.tasks.quantized import QuantizedMatrix, product_type

Comparison = Callable[[torch.Tensor], torch.Tensor]
"""Returns a loss, a scalar, from the log-likelihood of each document, (documents,) in float64."""


def likelihood_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    counts: Sequence[int],
    comparison: Comparison,
) -> torch.Tensor:
    """Return the loss that a comparison of documents gives.

    Args:
        hidden, weight, bias, targets: as for `fused_loss.summed_loss`.
        counts: number of targets of each document, in the order of the rows.

    Returns:
        A scalar, float32, differentiable once.
    """
    if not torch.is_grad_enabled():
        return comparison(likelihoods(hidden, weight, bias, targets, counts)).float()
    loss: torch.Tensor = _LikelihoodLoss.apply(hidden, weight, bias, targets, counts, comparison)
    return loss


def likelihoods(
    hidden: torch.Tensor,
    weight: torch.Tensor | QuantizedMatrix,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    counts: Sequence[int],
) -> torch.Tensor:
    """Return the log-likelihood of each document's targets, (documents,) in float64, in nats.

    Args: as for `likelihood_loss`. The result is not differentiable.
    """
    with torch.no_grad():
        return summed_by_document(_Rows(hidden, weight, bias, targets).nats(), counts)


def summed_by_document(nats: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the sums of consecutive values, in float64.

    A sum for each document, because adding by index has no fixed order on a GPU.

    Args:
        nats: (targets).
        counts: number of targets of each document.
    """
    parts = torch.split(nats, list(counts))
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


class _LikelihoodLoss(ForwardGradients):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | QuantizedMatrix,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        counts: Sequence[int],
        comparison: Comparison,
    ) -> torch.Tensor:
        rows = _Rows(hidden, weight, bias, targets)
        with torch.enable_grad():
            sums = summed_by_document(rows.nats(), counts).requires_grad_()
            loss = comparison(sums)
            (slopes,) = torch.autograd.grad(loss, sums)
        each = torch.cat([slope.expand(count) for slope, count in zip(slopes, counts, strict=True)])
        found = rows.gradients(each.float().unsqueeze(1), ctx.needs_input_grad)
        ctx.gradients = (found.hidden, found.weight, found.bias)
        return loss.detach().float()


@dataclass
class _Rows:
    """The rows that have a target, and the head.

    hidden: (..., width). weight: (vocabulary, width). targets: (...), int64.
    """

    hidden: torch.Tensor
    weight: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None
    targets: torch.Tensor

    def __post_init__(self) -> None:
        self.dtype = product_type(self.hidden.device, self.weight.dtype)
        self.kept = rows_with_target(self.targets.flatten())
        self.rows = self.hidden.detach().flatten(0, -2).index_select(0, self.kept).to(self.dtype)
        self.wanted = self.targets.flatten().index_select(0, self.kept).unsqueeze(1)
        self.head = (
            self.weight
            if isinstance(self.weight, QuantizedMatrix)
            else self.weight.detach().to(self.dtype)
        )

    def nats(self) -> torch.Tensor:
        """Return each target's log-likelihood, (rows,) in float32."""
        found = torch.empty(len(self.rows), device=self.rows.device)
        for logits, start in self._chunks():
            for place, whole in _blocks(logits, start):
                values = logits[place].float()
                values -= values.amax(1, keepdim=True)
                hit = values.gather(1, self.wanted[whole])
                found[whole] = (hit - values.exp_().sum(1, keepdim=True).log()).squeeze(1)
        return found

    def gradients(self, slopes: torch.Tensor, needed: Sequence[bool]) -> LossAndGradients:
        """Return the gradients of the sum of slope times log-likelihood.

        Args:
            slopes: (rows, 1), float32.
            needed: whether those of the hidden states, the weight and the bias are.
        """
        found = LossAndGradients.empty(self.rows, self.weight, self.bias, needed)
        for logits, start in self._chunks():
            for place, whole in _blocks(logits, start):
                values = logits[place].float()
                values -= values.amax(1, keepdim=True)
                values.exp_()
                values *= -slopes[whole] / values.sum(1, keepdim=True)
                values.scatter_add_(1, self.wanted[whole], slopes[whole])
                if found.bias is not None:
                    found.bias += values.sum(0)
                logits[place] = values
            add_gradients(found, logits, self.rows, self.head, slice(start, start + len(logits)))
        found.finish(self.hidden.flatten(0, -2), self.weight.dtype, self.kept)
        if found.hidden is not None:
            found.hidden = found.hidden.view_as(self.hidden)
        return found

    def _chunks(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the logits (rows, vocabulary) of consecutive rows, and the first row's index."""
        size = chunk_rows(self.weight.shape[0])
        for start in range(0, len(self.rows), size):
            logits = head_logits(self.rows[start : start + size], self.head)
            if self.bias is not None:
                logits += self.bias.to(self.dtype)
            yield logits, start


def _blocks(logits: torch.Tensor, start: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive rows of a chunk that fit in memory in 32 bits: in the chunk, and in all."""
    size = comparison_rows(logits.shape[1])
    for first in range(0, len(logits), size):
        end = min(first + size, len(logits))
        yield slice(first, end), slice(start + first, start + end)
