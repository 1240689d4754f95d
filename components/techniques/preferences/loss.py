"""The losses of answers: of pairs (DPO), and of good and bad ones (KTO).

From Rafailov et al. 2023, "Direct Preference Optimization", and Ethayarajh et al. 2024, "KTO".
"""

from __future__ import annotations

import torch
from torch.nn import functional


def reward_margins(found: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """Return how much more each pair's first document is rewarded than its second, (pairs,).

    A document's reward is beta times the logarithm of how much more likely it has become.

    Args:
        found, reference: log-likelihoods by the model and by its reference, (2 * pairs,).
    """
    rewards = beta * (found - reference)
    return rewards[0::2] - rewards[1::2]


def dpo_loss(margins: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the loss of each pair, in nats.

    Args:
        margins: (pairs,).
        smoothing: share of the target that is spread over both answers.
    """
    wrong = smoothing / 2
    right = functional.logsigmoid(margins) * (1 - wrong)
    return -right - wrong * functional.logsigmoid(-margins)


def kto_margins(gained: torch.Tensor, desirable: torch.Tensor, beta: float) -> torch.Tensor:
    """Return how far each answer's reward is on the right side of the reference point, (answers,).

    Args:
        gained: how much more likely each answer has become than at the reference point: the
            difference of log-likelihoods, (answers,).
        desirable: whether each is good, (answers,).
    """
    return beta * torch.where(desirable, gained, -gained)


def kto_loss(
    margins: torch.Tensor, desirable: torch.Tensor, weights: tuple[float, float]
) -> torch.Tensor:
    """Return the loss of each answer, from 0 to its weight, (answers,).

    Args:
        weights: of good answers and of bad ones.
    """
    return torch.where(desirable, *weights) * torch.sigmoid(-margins)
