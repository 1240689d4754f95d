"""The passes of a micro-batch in adversarial training.

Each is a forward and backward pass of its own, as those of further micro-batches. So gradients
accumulate, and ranks exchange them, as they do anyway. All passes of a micro-batch have the same
dropout, as in Zhu et al. 2020, "FreeLB", section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from steadytrain.components.tasks.attack import (
    ascended,
    perturbed,
    search,
    texts_of,
    unperturbed,
)
from steadytrain.components.tasks.base import Batch
from steadytrain.components.train.loop.setup import Parts


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass.

    share: of its loss in the loss of the micro-batch.
    last: whether it is the last one of its micro-batch.
    """

    share: float = 1.0
    last: bool = True


ONE_PASS: Final = (Pass(),)


def adversarial_passes(parts: Parts, batch: Batch) -> Iterator[Pass]:
    """Yield the passes of a micro-batch, each while its perturbation is in place.

    The next one is perturbed by the gradient that the backward pass of this one has left.
    """
    attack, module = parts.config.training.adversarial, parts.module
    dropout = _Dropout(parts.accelerator.device)

    def loss() -> torch.Tensor:
        dropout.repeat()
        # In 16 bits, the gradient of the loss itself would underflow.
        return parts.task.compute_loss(module, batch).total * max(parts.strategy.scale, 1.0)

    if attack.ascents:
        with perturbed(module, search(module, batch, attack, loss).detach()):
            dropout.repeat()
            yield Pass()
        return
    perturbation, texts = unperturbed(module, batch), texts_of(batch)
    for number in range(1, attack.passes + 1):
        dropout.repeat()
        with perturbed(module, perturbation):
            yield Pass(1 / attack.passes, last=number == attack.passes)
        if number < attack.passes:
            assert perturbation.grad is not None, "the model's embeddings are perturbed"
            perturbation = ascended(perturbation, perturbation.grad, attack, texts)


class _Dropout:
    """The state of the random generators that dropout draws from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def repeat(self) -> None:
        """Draw the same dropout again."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
