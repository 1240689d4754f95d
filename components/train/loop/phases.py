"""How long the phases of a step take on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steadytrain.components.train.strategy.base import Timer


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of a step's phases on this rank.

    backward: without waiting for the other ranks' gradients.
    optimizer: of clipping and the update. On a GPU, of the step before: the update of this one is
        not over yet when it is read.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0


class Phases:
    """Times the phases of steps.

    meeting: the wait for the other ranks before a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.meeting, self.forward = Timer(device), Timer(device)
        self.backward, self.optimizer = Timer(device), Timer(device)

    def take(self, exchanged: float) -> PhaseSeconds:
        """Return the seconds of the passes since the last call.

        Call this where the device has finished the backward pass, so that nothing waits for it.

        Args:
            exchanged: seconds of the backward passes in which this rank waited for the others.
        """
        return PhaseSeconds(
            forward=self.forward.take(),
            backward=max(0.0, self.backward.take() - exchanged),
        )
