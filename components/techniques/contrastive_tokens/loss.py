"""The contrastive loss of a causal language model: the token states of a document should differ.

From Su et al. 2022, "A Contrastive Framework for Neural Text Generation" (SimCTG): the hinge of the
cosine similarities between all pairs of states in a document, which keeps them from collapsing into
a narrow cone. All of it is in 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from steadytrain.components.shared.chunks import similarity_rows
from steadytrain.components.techniques.base import IGNORED, Batch
from steadytrain.components.techniques.contrastive_tokens import ContrastiveConfig

_SHORTEST = 1e-6
"""Norm that a state is divided by at least."""


@dataclass(frozen=True)
class Span:
    """A document in the flattened tokens of a micro-batch.

    targets: number of its targets, at least 1.
    """

    start: int
    end: int
    targets: int


def document_spans(batch: Batch) -> list[Span]:
    """Return the documents of a micro-batch that have a target and at least two tokens.

    Positions restart with each document, and with the padding at the end of a row, which has no
    target.
    """
    starts = (batch["position_ids"].flatten() == 0).nonzero().squeeze(1).tolist()
    wanted = (batch["targets"].flatten() != IGNORED).long().cumsum(0)
    before = [0, *wanted.tolist()]
    ends = [*starts[1:], len(wanted)]
    spans = (
        Span(start, end, before[end] - before[start])
        for start, end in zip(starts, ends, strict=True)
    )
    return [span for span in spans if span.targets and span.end - span.start > 1]


def similarity_loss(
    hidden: torch.Tensor, spans: Sequence[Span], settings: ContrastiveConfig
) -> torch.Tensor:
    """Return the mean loss of a document's pairs of states, times its targets, summed.

    So documents count in proportion to their targets, however they are split into micro-batches.

    Args:
        hidden: (..., width), the states of all tokens.

    Returns:
        A scalar, float32, differentiable once.
    """
    loss: torch.Tensor = _SimilarityLoss.apply(hidden.flatten(0, -2), spans, settings)
    return loss


class _SimilarityLoss(torch.autograd.Function):
    """Computes the gradient together with the loss, so that no similarities are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, spans: Sequence[Span], settings: ContrastiveConfig
    ) -> torch.Tensor:
        loss = torch.zeros((), device=hidden.device)
        gradient = torch.zeros_like(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for span in spans:
                block = slice(span.start, span.end)
                value, gradient[block] = _of_document(hidden[block].float(), span.targets, settings)
                loss += value
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0], None, None


def _of_document(
    states: torch.Tensor, targets: int, settings: ContrastiveConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a document's loss and its gradient (tokens, width), some rows of pairs at a time."""
    norms = states.norm(dim=1, keepdim=True).clamp_min(_SHORTEST)
    directions = states / norms
    loss, pulls = states.new_zeros(()), torch.empty_like(states)
    size = similarity_rows(len(states))
    for start in range(0, len(states), size):
        block = slice(start, start + size)
        # The similarity of a state with itself is 1.
        excess = directions[block] @ directions.T + (settings.margin - 1)
        excess.diagonal(start).fill_(-torch.inf)
        values, slopes = _hinge(excess, settings.temperature)
        loss += values.sum()
        pulls[block] = slopes @ directions
    # Each pair occurs twice, so a direction's gradient is twice the sum over its row.
    scale = targets / (len(states) * (len(states) - 1))
    along = (pulls * directions).sum(1, keepdim=True) * directions
    return loss * scale, (pulls - along) / norms * (2 * scale)


def _hinge(excess: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return max(0, excess) and its slope; a temperature above 0 rounds the corner."""
    if temperature == 0:
        return excess.clamp_min(0), (excess > 0).float()
    heated = excess / temperature
    return functional.softplus(heated) * temperature, heated.sigmoid()
