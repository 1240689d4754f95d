"""Loss weights of several tasks that training learns, from each task's uncertainty.

Kendall, Gal and Cipolla 2018, "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene
Geometry and Semantics", equation 10 for classification: a loss L counts L / sigma^2 + log(sigma).
What is learned is s = log(sigma^2), as the paper recommends: no division, and any s is valid.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from steadytrain.components.techniques.modules import Auxiliary, attach_auxiliary

_NAME: Final = "uncertainty"


class Uncertainty(Auxiliary):
    """Holds the log-variance s of each task, and returns it as the `loss` of the model's output.

    Args:
        tasks: their number. Each begins with s = 0, which is weight 1.
    """

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.log_variances = torch.nn.Parameter(torch.zeros(tasks))

    def forward(self) -> torch.Tensor:
        """Return the log-variances, (tasks), float32."""
        # Not the parameter itself: ZeRO-3 takes its values away after the forward pass.
        return self.log_variances.float() + 0.0

    def answer(self, model: torch.nn.Module, inputs: object, output: Any) -> Any:
        del model, inputs
        output["loss"] = self()
        return output


def attach_uncertainty(model: Any, tasks: int) -> None:
    """Add `Uncertainty` to a model of Transformers, which is never given targets."""
    attach_auxiliary(model, _NAME, Uncertainty(tasks))


def uncertain_loss(
    losses: torch.Tensor, tasks: torch.Tensor, log_variances: torch.Tensor
) -> torch.Tensor:
    """Return the summed loss of rows, a scalar.

    Args:
        losses: (rows), in nats.
        tasks: (rows), the task of each row.
        log_variances: (tasks).
    """
    own = log_variances[tasks]
    return (losses * (-own).exp() + own / 2).sum()
