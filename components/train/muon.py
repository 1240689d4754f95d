"""Muon for the matrices of a model's layers, and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """PyTorch's two optimizers as one, with one learning rate.

    Updates of matrices are scaled to AdamW's root mean square (Liu et al. 2025, "Muon is Scalable
    for LLM Training", section 2.2), so that both take the same rate.

    Args:
        groups: parameter groups with `matrices` (see `OptimizerSpec.separates_matrices`) and
            `weight_decay`.
        adamw: builds AdamW for groups.
        options: of `torch.optim.Muon`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adamw: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        lr: float,
        **options: Any,
    ) -> None:
        matrices = [group for group in groups if group["matrices"]]
        others = [group for group in groups if not group["matrices"]]
        muon = torch.optim.Muon(matrices, lr, **options, adjust_lr_fn="match_rms_adamw")
        self._members = {True: muon, False: adamw(others)} if others else {True: muon}
        # Each group has the defaults of its own optimizer by now.
        super().__init__(groups, self._members[not others].defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for matrices, member in self._members.items():
            # Groups and state belong to this optimizer: schedules and checkpoints change them here.
            member.state = self.state
            member.param_groups = [
                group for group in self.param_groups if group["matrices"] is matrices
            ]
            member.step()
        return loss
