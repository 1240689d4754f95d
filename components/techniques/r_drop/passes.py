"""Two passes of each example with different dropout, and how far apart they are.

From Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks".
"""

from __future__ import annotations

import torch

from steadytrain.components.techniques.base import Batch


def diverging(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return what each class adds to both directions of the Kullback-Leibler divergence together.

    Args:
        first, second: logarithms of probabilities.
    """
    return (first.exp() - second.exp()) * (first - second)


def twice(batch: Batch) -> Batch:
    """Return a micro-batch followed by itself, for two passes at once.

    Each entry is (rows, ...), or for packed documents (1, tokens) with a list of their lengths.
    """
    along = 1 if "lengths" in batch else 0
    return {
        name: torch.cat([value, value], along) if isinstance(value, torch.Tensor) else value * 2
        for name, value in batch.items()
    }


def in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Reorder rows so that those of both passes alternate.

    Args:
        rows: (2n, ...), those of the first pass and then those of the second.
    """
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)
