"""Texts with a number each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from steadytrain.components.train.with_transformers.common import RUN, Rows, train
from steadytrain.components.train.with_transformers.texts import Texts


class Numbers(Texts):
    """A target is a standardized number.

    shift, unit: mean and deviation of the numbers.
    """

    problem = "regression"
    shift, unit = 0.0, 1.0

    def labels(self) -> Sequence[str]:
        return [RUN["label"]]

    def begin(self, rows: Rows, model: Any) -> None:
        """Let the head learn numbers with a mean of 0 and a deviation of 1.

        Without a bias, it cannot hold the mean: its numbers are divided by their root mean square.
        """
        numbers = rows.table["label"].to_numpy()
        name, head = number_head(model)
        biased = head.bias is not None
        self.shift = float(numbers.mean()) if biased else 0.0
        self.unit = float(numbers.std() if biased else math.sqrt(np.square(numbers).mean()))
        if RUN["base"] is not None and f"{name}.weight" not in self.new:
            # It returns numbers already.
            rescale(head, -self.shift / self.unit, 1 / self.unit)

    def targets(self, labels: Sequence[Any]) -> torch.Tensor:
        numbers = np.asarray(labels, np.float64)
        return torch.from_numpy((numbers - self.shift) / self.unit).float()

    def loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        items = len(labels) if num_items_in_batch is None else num_items_in_batch
        return (outputs.logits.float()[:, 0] - labels).square().sum() / items

    def end(self, model: Any) -> None:
        """Let the model return the numbers of the data."""
        rescale(number_head(model)[1], self.shift, self.unit)


def number_head(model: Any) -> tuple[str, torch.nn.Linear]:
    """Return the name and the layer whose output is the number."""
    inner = f"{model.base_model_prefix}."
    heads = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear and layer.out_features == 1
        if not name.startswith(inner)
    ]
    if not heads:
        raise SystemExit("the model has no linear head for a number, which the script needs")
    return heads[-1]


@torch.no_grad()
def rescale(head: torch.nn.Linear, shift: float, unit: float) -> None:
    """Multiply what a head returns by the unit, and add the shift."""
    head.weight.mul_(unit)
    if head.bias is not None:
        head.bias.mul_(unit).add_(shift)


if __name__ == "__main__":
    train(Numbers)
