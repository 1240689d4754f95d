"""What techniques build on: rows, micro-batches, and the loop's calls to training components.

This module does not import torch, because a configuration is also checked where torch is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    import torch

    from steadytrain.components.shared.events import Event

Row = Mapping[str, Any]
"""A row of a prepared shard, as plain Python and NumPy values."""

Batch = dict[str, Any]
"""One micro-batch. The loop moves tensors to the device and leaves plain values where they are."""

IGNORED: Final = -100
"""Target where nothing is predicted, as in PyTorch's cross-entropy."""


@dataclass(frozen=True)
class TrainingContext:
    """What a component can use on its rank.

    weights: this rank's part of each trained weight, by name. What the mapping returns has the
        current values: look a weight up each time, and do not change it.
    folder: the run's folder. Only rank 0 may write there.
    attempt: number of the attempt.
    sharded: whether `weights` are only parts, so that sums over them need all ranks.
    gradients: returns this rank's part of the gradients by the weight's name. Only for
        `before_update`: they are cleared afterwards. Clipping has scaled them already.
    emit: adds an event to the run. Only events of rank 0 count.
    """

    weights: Mapping[str, torch.Tensor]
    rank: int
    world_size: int
    folder: Path
    attempt: int
    sharded: bool
    gradients: Callable[[], Mapping[str, torch.Tensor]]
    emit: Callable[[Event], None]


@dataclass(frozen=True)
class Update:
    """An optimizer step. All values are equal on all ranks.

    step: number of steps done, 1 after the first.
    loss: mean over the targets of the global batch.
    grad_norm: before clipping.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float


class TrainingComponent:
    """A part of the training loop that an installed package adds. Every method is optional.

    Each rank creates the component with its options from `training.components` as keyword
    arguments, and so does every check of the configuration. So `__init__` only checks and stores
    its options, raises ValueError for a bad one, and the module imports torch inside functions.

    All ranks call the same methods at the same steps. An exception ends the run as a bug in the
    user's code, except if memory ran out or the exception is one of steadytrain's own.

    exports: name of the tensors, as in `tensors`, that replace the weights in validation and in the
        exported model; "" if the component replaces none.
    weight_copies: number of tensors for each trained weight in `tensors`, for the memory in plans.
    """

    exports: ClassVar[str] = ""
    weight_copies: ClassVar[int] = 0

    def begin(self, context: TrainingContext) -> None:
        """Create the state, right before the first step or before the state is restored."""

    def before_step(self, step: int) -> None:
        """Called before each step, with the number that it will have."""

    def after_backward(self, batch: Batch) -> None:
        """Called after the backward pass of each of this rank's micro-batches."""

    def before_update(self, update: Update) -> None:
        """Called before each update of the weights, with the gradients that it will use.

        `update.grad_norm` is NaN under ZeRO, which computes it in the update.
        """

    def after_update(self, update: Update) -> None:
        """Called after each update of the weights, but not if a loss scaler skipped it."""

    def after_step(self, step: int) -> None:
        """Called after each step, also if a loss scaler skipped its update."""

    def before_validation(self) -> None:
        """Called before each validation."""

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Called after each validation with its metrics."""

    def tensors(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the state that has the shape of the weights: by its name, then by the weight's.

        Each tensor has the shape of the same tensor in `TrainingContext.weights`, so it is sharded
        like the weight. Checkpoints store these tensors, and a resume writes into them.
        """
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the rest of the state as plain JSON data. Checkpoints store that of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The tensors are restored already."""
