"""Neural networks by PyTorch: a multilayer perceptron, and TabM, which is many that share weights.

Gorishniy, Kotelnikov and Babenko 2024, "TabM: Advancing Tabular Deep Learning with
Parameter-Efficient Ensembling" (arXiv:2410.24210).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular.learners.base import Array, TableLearner
from steadytrain.components.tabular.model import NetworkInputs, NetworkModel, TableModel
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.learner import State

_QUANTILES: Final = 1000
_DEFAULTS: Final = {"width": 256, "layers": 3, "dropout": 0.1, "weight_decay": 1e-4}
_RATE: Final = 1e-3
_BATCH: Final = 256
"""Records of a step of the optimizer. Small tables have fewer, for at least 16 steps an epoch."""
_GRADIENT: Final = 1.0
"""L2 norm to which gradients are clipped."""


class MlpLearner(TableLearner):
    """A step is an epoch of AdamW. Its random numbers depend on the number of epochs alone.

    members: how many networks there are. They share the weights of `NetworkModel`.
    """

    model_type = "mlp"
    has_rate = True
    settings = ("width", "layers", "dropout", "weight_decay", "batch_size")
    members = 1

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.sizes = {name: self._number(name, like) for name, like in _DEFAULTS.items()}
        fitting = max(16, min(_BATCH, len(self.targets) // 16))
        self.batch = int(self._number("batch_size", fitting))
        self.rate = config.training.learning_rate or _RATE
        arrays = _quantiles(self.matrix, self.preparation.categories)
        self.inputs = NetworkInputs(self.preparation, arrays)
        numbers, places = self.inputs.read(self.matrix)
        self.numbers, self.places = torch.from_numpy(numbers), torch.from_numpy(places)
        self.middle = np.zeros(2) if self.labels else np.array([0.0, 1.0])
        if not self.labels:
            mean = np.average(self.targets, weights=self.row_weights)
            self.middle = np.array([mean, self.targets.std() or 1.0])
        self.epochs = 0
        self.weights = self._new_weights(numbers.shape[1])
        self.moments = [
            {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
            for _ in range(2)
        ]
        self.parameters = sum(weight.numel() for weight in self.weights.values())

    def _number(self, name: str, like: float) -> float:
        found = self.given.get(name, like)
        whole, least = isinstance(like, int), 1 if isinstance(like, int) else 0
        most = 1 if name == "dropout" else math.inf
        kinds = int if whole else (int, float)
        if isinstance(found, bool) or not isinstance(found, kinds) or not least <= found < most:
            raise BadInput(
                f"model.config.{name} = {found!r}: it is not a {'whole ' * whole}number from "
                f"{least}{' to below 1' * (name == 'dropout')}",
                remedy=f"use a number such as {like}",
            )
        return found

    def _new_weights(self, numbers: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(self.seed)

        def uniform(*shape: int, fan: int) -> torch.Tensor:
            return (2 * torch.rand(*shape, generator=chance) - 1) / math.sqrt(fan)

        found, wide = dict[str, torch.Tensor](), numbers
        for place, count in enumerate(self.inputs.counts):
            size = min(16, 1 + math.ceil(count**0.5))
            found[f"embedding{place}"] = uniform(count + 1, size, fan=size)
            wide += size
        out = int(self.sizes["width"])
        for layer in range(int(self.sizes["layers"])):
            found[f"weight{layer}"] = uniform(wide, out, fan=wide)
            found[f"bias{layer}"] = uniform(self.members, out, fan=wide)
            if self.members > 1:
                signs = torch.randint(0, 2, (self.members, wide), generator=chance) * 2.0 - 1
                found[f"before{layer}"] = signs if layer == 0 else torch.ones(self.members, wide)
                found[f"after{layer}"] = torch.ones(self.members, out)
            wide = out
        outputs = max(1, len(self.labels))
        found["head"] = uniform(self.members, wide, outputs, fan=wide)
        found["head_bias"] = torch.zeros(self.members, outputs)
        return found

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
        clip = (_GRADIENT / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for (name, weight), gradient in zip(self.weights.items(), gradients, strict=True):
                weight.requires_grad_(False)
                first, second = (moment[name] for moment in self.moments)
                first.lerp_(gradient * clip, 0.1)
                second.lerp_((gradient * clip).square(), 0.001)
                weight.mul_(1 - rate * self.sizes["weight_decay"])
                root = (second / (1 - 0.999**taken)).sqrt() + 1e-8
                weight.sub_(rate * (first / (1 - 0.9**taken)) / root)
        scale = 1.0 if self.labels else float(self.middle[1]) ** 2
        return float(loss.detach()) * scale

    def _loss(self, some: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
        found = self._forward(some, chance)
        targets = torch.from_numpy(self.targets)[some]
        if self.labels:
            rows = targets.long().expand(self.members, -1)
            losses = functional.cross_entropy(found.flatten(0, 1), rows.flatten(), reduction="none")
        else:
            aim = ((targets - self.middle[0]) / self.middle[1]).float()
            losses = (found[..., 0] - aim).square().flatten()
        losses = losses.view(self.members, -1).mean(dim=0)
        if self.row_weights is not None:
            losses = losses * torch.from_numpy(self.row_weights).float()[some]
        return losses.mean()

    def _forward(self, some: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
        """Return (members, rows, outputs)."""
        weights = self.weights
        embedded = [
            weights[f"embedding{place}"][self.places[some, place]]
            for place in range(len(self.inputs.counts))
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

    def held_out(self) -> Array:
        found: Array = self.model().raw(self.held_out_matrix)
        return found

    def model(self) -> TableModel:
        arrays = {name: weight.numpy().copy() for name, weight in self.weights.items()}
        return NetworkModel(
            *(self.preparation, self.labels, self.middle), **self.inputs.arrays, **arrays
        )

    def state(self) -> State:
        return {name: tensor.numpy() for name, tensor in self._tensors()} | {
            "epochs": np.array(self.epochs)
        }

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()
        for place, moment in enumerate(self.moments):
            yield from ((f"moment{place} {name}", tensor) for name, tensor in moment.items())

    def restore(self, state: State) -> None:
        self.epochs = int(state["epochs"])
        for name, tensor in self._tensors():
            tensor.copy_(torch.from_numpy(state[name]))


class TabMLearner(MlpLearner):
    """32 perceptrons that share their weights, but for a scale of each input and output."""

    model_type = "tabm"
    members = 32


def _quantiles(matrix: Array, categories: Sequence[int]) -> dict[str, Any]:
    """Return points of each column of numbers, and what a normal distribution has there."""
    points, scores, ends = [np.zeros(0)], [np.zeros(0)], [0]
    normal = NormalDist()
    for place in range(matrix.shape[1]):
        if place in categories:
            continue
        present = np.sort(matrix[:, place][~np.isnan(matrix[:, place])])
        shares = np.linspace(0, 1, min(_QUANTILES, len(present)))
        values = np.quantile(present, shares) if len(present) else np.zeros(0)
        unique, where = np.unique(values, return_inverse=True)
        # A value that is often there has the mean of its shares.
        middle = np.bincount(where, shares) / np.maximum(np.bincount(where), 1)
        points.append(unique)
        scores.append(np.array([normal.inv_cdf(min(max(x, 1e-3), 1 - 1e-3)) for x in middle]))
        ends.append(ends[-1] + len(unique))
    return {
        "points": np.concatenate(points),
        "scores": np.concatenate(scores),
        "ends": np.array(ends),
    }


MODELS: Final[dict[str, type[TableLearner]]] = {
    learner.model_type: learner for learner in (MlpLearner, TabMLearner)
}
