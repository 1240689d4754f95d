"""What the training loop knows of a strategy, whichever it is."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from steadytrain.components.train.checkpoint.state import optimizer_settings

if TYPE_CHECKING:
    from steadytrain.components.train.checkpoint import Checkpoint
    from steadytrain.components.train.checkpoint.snapshot import Piece


MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight."""


class Strategy(ABC):
    """A model and its optimizer on the ranks of this world.

    module: the task's own model. model: what forward passes go through.
    optimizer: whose parameter groups hold the learning rates.
    """

    shares_weights: ClassVar[bool] = False
    """Whether no rank has the whole model; then every forward pass is one of all ranks."""

    module: torch.nn.Module
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the forward and backward pass of a micro-batch of a step.

        Args:
            last: whether an update follows it.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Gradients, which are averaged over the ranks."""

    @abstractmethod
    def clip(self, limit: float) -> float | None:
        """Norm of the gradients of all ranks before they are clipped.

        Args:
            limit: largest norm that they have afterwards; infinite: they stay as they are.

        Returns:
            None where only the update tells it.
        """

    @abstractmethod
    def update(self) -> float | None:
        """Changes the weights and clears the gradients.

        Returns:
            The norm, where `clip` could not tell it.
        """

    @property
    def skipped(self) -> bool:
        """Whether the last update was left out, since a gradient overflowed."""
        return False

    @property
    def scale(self) -> float:
        """What a loss is multiplied by so that no gradient underflows; 0 without a scaler."""
        return 0.0

    def settings(self) -> dict[str, Any]:
        """What is no tensor of the optimizer's state, as plain data: learning rates and so on."""
        return {"groups": optimizer_settings(self.optimizer), "scaler": None}

    @abstractmethod
    def pieces(self) -> Mapping[str, Sequence[Piece]]:
        """What this rank keeps of the state, by part: "model", "optimizer"."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
        """Puts back a checkpoint, written by whichever strategy and number of ranks.

        Args:
            settings: what `settings` gave then, whatever else is with it.

        Raises:
            CheckpointDamaged: it is not as it was written, or of another model.
        """


def restore_groups(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> None:
    """Gives parameter groups the learning rates and so on that they had."""
    for group, before in zip(optimizer.param_groups, settings["groups"], strict=True):
        group.update(before)
