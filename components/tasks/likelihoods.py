"""Log-likelihoods of consecutive targets, such as those of a document or a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from steadytrain.components.tasks.fused_head import request_likelihoods
from steadytrain.components.tasks.fused_likelihood import Comparison, summed_by_document
from steadytrain.components.techniques.base import IGNORED


def likelihoods_of(
    forward: Callable[[], torch.Tensor],
    targets: torch.Tensor,
    counts: Sequence[int],
    comparison: Comparison | None = None,
) -> torch.Tensor:
    """Return the log-likelihood of each part's targets, (parts,), or the loss of comparing them.

    Only the loss is differentiable, and once.

    Args:
        forward: runs the model; returns its logits, or what its head is requested to return.
        targets: (rows, length), int64.
        counts: number of targets of each part, in the order of the tokens.
    """
    with request_likelihoods(targets, counts, comparison) as request:
        logits = forward()
    if request.found is not None:
        # The model's wrappers attached their backward work to this output, not to `request.found`.
        return request.found if comparison is None else logits
    targets = targets.flatten()
    kept = (targets != IGNORED).nonzero().squeeze(1)
    chosen = logits.flatten(0, 1)[kept].float()
    nats = -functional.cross_entropy(chosen, targets[kept], reduction="none")
    sums = summed_by_document(nats, counts)
    return sums if comparison is None else comparison(sums).float()
