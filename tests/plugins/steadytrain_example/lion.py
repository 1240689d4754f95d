"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"), for PyTorch."""

import torch


class Lion(torch.optim.Optimizer):
    """Updates each weight by the sign of its smoothed gradient."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight, group):
        state, (fast, slow) = self.state[weight], group["betas"]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(momentum.lerp(weight.grad, 1 - fast).sign_(), alpha=group["lr"])
        momentum.lerp_(weight.grad, 1 - slow)
