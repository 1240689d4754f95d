"""Neural networks by PyTorch: a multilayer perceptron, and TabM, which is many that share weights.

Gorishniy, Kotelnikov and Babenko 2024, "TabM: Advancing Tabular Deep Learning with
Parameter-Efficient Ensembling" (arXiv:2410.24210).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TableLearner
from steadytrain.components.tabular.learners.networks import (
    GRADIENT,
    NetworkLearner,
    embedding_size,
)
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.learner import State


class MlpLearner(NetworkLearner):
    """A step is an epoch of AdamW. Its random numbers depend on the number of epochs alone.

    members: how many networks there are. They share the weights of `NetworkModel`.
    """

    members = 1
    learns_sets = True

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        numbers, places = self.inputs.read(self.matrix)
        self.numbers, self.places = torch.from_numpy(numbers), torch.from_numpy(places)
        self.weights = self._new_weights(numbers.shape[1])
        self.moments = [
            {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
            for _ in range(2)
        ]
        self.parameters = sum(weight.numel() for weight in self.weights.values())

    def _new_weights(self, numbers: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(self.seed)

        def uniform(*shape: int, fan: int) -> torch.Tensor:
            return (2 * torch.rand(*shape, generator=chance) - 1) / math.sqrt(fan)

        result, wide = dict[str, torch.Tensor](), numbers
        for index, count in enumerate(self.inputs.counts):
            size = embedding_size(count)
            result[f"embedding{index}"] = uniform(count + 1, size, fan=size)
            wide += size
        out = int(self.sizes["width"])
        for layer in range(int(self.sizes["layers"])):
            result[f"weight{layer}"] = uniform(wide, out, fan=wide)
            result[f"bias{layer}"] = uniform(self.members, out, fan=wide)
            if self.members > 1:
                signs = torch.randint(0, 2, (self.members, wide), generator=chance) * 2.0 - 1
                result[f"before{layer}"] = signs if layer == 0 else torch.ones(self.members, wide)
                result[f"after{layer}"] = torch.ones(self.members, out)
            wide = out
        outputs = max(1, len(self.labels))
        result["head"] = uniform(self.members, wide, outputs, fan=wide)
        result["head_bias"] = torch.zeros(self.members, outputs)
        return result

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        chance = torch.Generator().manual_seed(self.seed + self.epochs)
        rate = self.rate * learning_rate_scale
        total = 0.0
        order = torch.randperm(len(self.targets), generator=chance)
        for step, some in enumerate(torch.split(order, self.batch)):
            taken = self.epochs * math.ceil(len(order) / self.batch) + step + 1
            total += self._step(some, taken, rate, chance) * len(some)
        self.epochs += 1
        return Learned(total / len(self.targets), rate)

    def _step(self, some: torch.Tensor, taken: int, rate: float, chance: torch.Generator) -> float:
        """Take a step of AdamW on some rows, and return their mean loss.

        Args:
            taken: the number of this step since the first epoch.
        """
        for weight in self.weights.values():
            weight.requires_grad_(True)
        loss = self._loss(some, chance)
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        clip = (GRADIENT / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for (name, weight), gradient in zip(self.weights.items(), gradients, strict=True):
                weight.requires_grad_(False)
                first, second = (moment[name] for moment in self.moments)
                first.lerp_(gradient * clip, 0.1)
                second.lerp_((gradient * clip).square(), 0.001)
                weight.mul_(1 - rate * self.sizes["weight_decay"])
                root = (second / (1 - 0.999**taken)).sqrt() + 1e-8
                weight.sub_(rate * (first / (1 - 0.9**taken)) / root)
        return float(loss.detach()) * self.scale

    def _loss(self, some: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
        outputs = self._forward(some, chance)
        targets = torch.from_numpy(self.targets)[some]
        if self.sets:
            flags = targets.float().expand_as(outputs)
            losses = functional.binary_cross_entropy_with_logits(outputs, flags, reduction="none")
            losses = losses.mean(dim=2).flatten()
        elif self.labels:
            rows = targets.long().expand(self.members, -1)
            losses = functional.cross_entropy(
                outputs.flatten(0, 1), rows.flatten(), reduction="none"
            )
        else:
            aim = torch.from_numpy(self.aims)[some].float()
            losses = (outputs[..., 0] - aim).square().flatten()
        losses = losses.view(self.members, -1).mean(dim=0)
        if self.row_weights is not None:
            losses = losses * torch.from_numpy(self.row_weights).float()[some]
        return losses.mean()

    def _forward(self, some: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
        """Return (members, rows, outputs)."""
        weights = self.weights
        embedded = [
            weights[f"embedding{index}"][self.places[some, index]]
            for index in range(len(self.inputs.counts))
        ]
        hidden = torch.cat([self.numbers[some], *embedded], dim=1).unsqueeze(0)
        keep = 1 - self.sizes["dropout"]
        for layer in range(int(self.sizes["layers"])):
            if self.members > 1:
                hidden = hidden * weights[f"before{layer}"].unsqueeze(1)
            hidden = hidden @ weights[f"weight{layer}"]
            if self.members > 1:
                hidden = hidden * weights[f"after{layer}"].unsqueeze(1)
            hidden = (hidden + weights[f"bias{layer}"].unsqueeze(1)).relu()
            if keep < 1:
                kept = torch.rand(hidden.shape, generator=chance) < keep
                hidden = hidden * kept / keep
        return hidden @ weights["head"] + weights["head_bias"].unsqueeze(1)

    def trained(self) -> dict[str, Array]:
        return {name: weight.numpy().copy() for name, weight in self.weights.items()}

    def state(self) -> State:
        return {name: tensor.numpy() for name, tensor in self._tensors()} | {
            "epochs": np.array(self.epochs)
        }

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()
        for index, moment in enumerate(self.moments):
            yield from ((f"moment{index} {name}", tensor) for name, tensor in moment.items())

    def restore(self, state: State) -> None:
        self.epochs = int(state["epochs"])
        for name, tensor in self._tensors():
            tensor.copy_(torch.from_numpy(state[name]))


class TabMLearner(MlpLearner):
    """32 perceptrons that share their weights, but for a scale of each input and output."""

    model_type = "tabm"
    members = 32


MODELS: Final[dict[str, type[TableLearner]]] = {
    learner.model_type: learner for learner in (MlpLearner, TabMLearner)
}
