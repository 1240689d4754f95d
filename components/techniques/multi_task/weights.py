"""How often each of several tasks is drawn, by its rows or by weights, and what its loss counts.

Training can learn the weights of the losses from each task's uncertainty: Kendall, Gal and Cipolla
2018, "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and Semantics",
equation 10 for classification: a loss L counts L / sigma^2 + log(sigma). What is learned is s =
log(sigma^2), as the paper recommends: no division, and any s is valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.shared.class_names import part_indices
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques import order
from steadytrain.components.techniques.modules import Auxiliary, attach_auxiliary
from steadytrain.components.techniques.multi_task import MultiTaskConfig
from steadytrain.components.techniques.order import Mixture, largest_remainder


def mixture_of(
    labels: npt.NDArray[np.int32], names: Sequence[str], config: MultiTaskConfig, seed: int
) -> Mixture:
    """Return the configured mixture.

    Args:
        labels: (rows,), the class of each row.
        names: of the classes.

    Raises:
        BadInput: a part's share is so small that it would never be drawn.
    """
    parts, owners = part_indices(names)
    of_rows = np.asarray(owners)[labels]
    sizes = np.bincount(of_rows, minlength=len(parts))
    shares = shares_of(dict(zip(parts, sizes.tolist(), strict=True)), config)
    for name, count in zip(parts, largest_remainder(shares, order.BLOCK), strict=True):
        if not count:
            raise BadInput(
                f"training.multi_task.sampling = {config.sampling!r}: the part {name!r} has a "
                f"share below 1 in {order.BLOCK}",
                remedy="give it a larger weight, raise the temperature, or leave it out",
            )
    return Mixture(of_rows, shares, seed, names=parts)


def shares_of(sizes: Mapping[str, int], config: MultiTaskConfig) -> npt.NDArray[np.float64]:
    """Return how often each part is drawn, (parts,).

    Args:
        sizes: rows of each part.
    """
    if config.sampling == "weights":
        weights = np.array([config.sampling_weights[name] for name in sizes])
    else:
        power = 1 / config.temperature if config.sampling == "temperature" else 1.0
        weights = np.array([float(size) for size in sizes.values()]) ** power
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


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
    of_rows = log_variances[tasks]
    return (losses * (-of_rows).exp() + of_rows / 2).sum()
