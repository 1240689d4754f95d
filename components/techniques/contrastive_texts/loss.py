"""Contrastive losses of texts: against the others of a micro-batch, or by class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from steadytrain.components.techniques.base import Batch

# The loss and the ranks of a text's counterpart among other texts.
#
# From Henderson et al. 2017, "Efficient Natural Language Response Suggestion for Smart Reply",
# section 4.4: the counterparts of the other texts are the negatives. With cosine similarities and
# a temperature, it is the InfoNCE loss of Gao et al. 2021, "SimCSE", equation 1, and the multiple
# negatives ranking loss of sentence-transformers. All of it is in 32 bits.


@dataclass(frozen=True)
class Compared:
    """How similar each text is to its own counterpart and to the negatives.

    own: (texts,), float32, from -1 to 1.
    others: (texts, candidates), float32; minus infinity for a candidate that is no negative.
    """

    own: torch.Tensor
    others: torch.Tensor

    def losses(self, temperature: float, smoothing: float = 0.0) -> torch.Tensor:
        """Return the cross-entropy of finding the counterpart, (texts,), in nats.

        Args:
            temperature: divides the similarities.
            smoothing: share of the target that is spread over counterpart and negatives.
        """
        scores = torch.cat([self.own.unsqueeze(1), self.others], 1) / temperature
        chances = scores.log_softmax(1)
        result = -chances[:, 0]
        if not smoothing:
            return result
        kept = scores.isfinite()
        even = torch.where(kept, chances, 0.0).sum(1) / kept.sum(1)
        return (1 - smoothing) * result - smoothing * even

    def ranks(self) -> torch.Tensor:
        """Return the place of each counterpart, from 1, (texts,). In a tie, it comes last."""
        return 1 + (self.others >= self.own.unsqueeze(1)).sum(1)


def compare(
    texts: torch.Tensor, own: torch.Tensor, candidates: torch.Tensor, alike: torch.Tensor
) -> Compared:
    """Return the cosine similarities.

    Args:
        texts, own: (texts, width), embeddings of texts and of their counterparts.
        candidates: (candidates, width).
        alike: (texts, candidates), bool: the candidates that are no negatives of a text.
    """
    with torch.autocast(texts.device.type, enabled=False):
        texts, own, candidates = (
            functional.normalize(rows.float(), dim=1) for rows in (texts, own, candidates)
        )
        similar = texts @ candidates.T
    return Compared((texts * own).sum(1), similar.masked_fill(alike, -torch.inf))


def excluded_negatives(
    texts: torch.Tensor,
    own: torch.Tensor,
    their_texts: torch.Tensor,
    candidates: torch.Tensor,
) -> torch.Tensor:
    """Return which candidates are no negatives of which texts, (texts, candidates), bool.

    A candidate is none if it is the text's own counterpart, a counterpart of the same text, or the
    text itself.

    Args:
        texts, own: (texts,), numbers of the texts and of their counterparts; equal texts have equal
            numbers.
        their_texts, candidates: (candidates,), the same for the candidates.
    """
    return (
        (candidates == own.unsqueeze(1))
        | (candidates == texts.unsqueeze(1))
        | (their_texts == texts.unsqueeze(1))
    )


def numbered(texts: Sequence[Hashable]) -> torch.Tensor:
    """Return a number for each text, (texts,), int64: equal texts have equal numbers."""
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(text, len(known)) for text in texts])


# The supervised contrastive loss of a micro-batch: rows of one class should have similar states.
#
# From Khosla et al. 2020, "Supervised Contrastive Learning", equation 2; for fine-tuning encoders:
# Gunel et al. 2021. All of it is in 32 bits.


def pooled(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean state of each row's tokens, (rows, width), float32.

    Args:
        states: (rows, length, width).
        mask: (rows, length), 1 for tokens and 0 for padding.
    """
    kept = mask.unsqueeze(2).float()
    return (states.float() * kept).sum(1) / kept.sum(1).clamp_min(1)


def supervised_contrastive_loss(
    rows: torch.Tensor, labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the loss summed over the rows. A row that is alone in its class has none.

    Args:
        rows: (rows, width), float32, of any length.
        labels: (rows), int64.
    """
    with torch.autocast(rows.device.type, enabled=False):
        directions = functional.normalize(rows, dim=1)
        similar = directions @ directions.T / temperature
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    chances = similar.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positive = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    counts = positive.sum(1)
    # One row has no other row, and its sum over none is minus infinity.
    each = torch.where(positive, chances - similar, 0.0).sum(1) / counts.clamp_min(1)
    return each.sum()


def embedded(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the embedding of each text of a micro-batch, (texts, width), float32."""
    states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return pooled(states.last_hidden_state, batch["attention_mask"])


def without_pooler(model: Any) -> torch.nn.Module:
    """Return the model without the layer after the first token's state, which nothing here uses.

    It would get no gradients, and ranks could not exchange them.
    """
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    result: torch.nn.Module = model
    return result
