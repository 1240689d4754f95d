"""The loss and the ranks of a text's counterpart among other texts.

From Henderson et al. 2017, "Efficient Natural Language Response Suggestion for Smart Reply",
section 4.4: the counterparts of the other texts are the negatives. With cosine similarities and a
temperature, it is the InfoNCE loss of Gao et al. 2021, "SimCSE", equation 1, and the multiple
negatives ranking loss of sentence-transformers. All of it is in 32 bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional


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
        found = -chances[:, 0]
        if not smoothing:
            return found
        kept = scores.isfinite()
        even = torch.where(kept, chances, 0.0).sum(1) / kept.sum(1)
        return (1 - smoothing) * found - smoothing * even

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


def alike(
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
