"""Parameter groups that are frozen at first, and unfrozen later (Howard and Ruder 2018, ULMFiT)."""

from __future__ import annotations

import torch

from steadytrain.components.shared.config.steps import whole_steps


class Freezing:
    """Decides at each step which parameters have gradients.

    A frozen parameter has no gradient, so no optimizer updates it or keeps anything for it. DDP
    knows it from the start and treats it as unused.

    Args:
        optimizer: its groups with `unfreeze_at` are frozen until that step.
        steps: optimizer steps of the full training run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._starts = [
            (whole_steps(group["unfreeze_at"], steps), group["params"])
            for group in optimizer.param_groups
            if group.get("unfreeze_at")
        ]

    def before_step(self, step: int) -> None:
        """Freeze or unfreeze all groups for a step, which counts from 1."""
        for start, parameters in self._starts:
            for parameter in parameters:
                parameter.requires_grad_(step > start)
