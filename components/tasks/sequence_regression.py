"""Predict a number for a text, by an encoder or decoder with a head of one output.

Training standardizes the numbers. The exported head answers in the units of the data.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Batch, Components, LossSum, Row
from steadytrain.components.tasks.loaded_weights import dtype_of_files, resized_weights
from steadytrain.components.tasks.packaging import TransformersPackager
from steadytrain.components.tasks.scoring.table import training_numbers
from steadytrain.components.tasks.text import (
    TextHead,
    class_head,
    has_new_head,
    head_logits,
    padded_inputs,
)

_SCALE: Final = "_steadytrain_scale"
"""Attribute of a model whose head returns targets."""

_FAR: Final = 10.0
"""Bias of a head, in standard deviations, that hardly any text is predicted with."""


@dataclass(frozen=True)
class Scale:
    """How a number becomes what the head learns: (number - shift) / unit."""

    shift: float = 0.0
    unit: float = 1.0

    def targets(self, numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
        result: npt.NDArray[np.float64] = (np.asarray(numbers, np.float64) - self.shift) / self.unit
        return result


def standardize(model: Any, data: DataRecord, *, trained: bool) -> Scale | None:
    """Make the head of a model return standardized targets: mean 0, standard deviation 1.

    Without a bias, it cannot hold the mean: its numbers are divided by their root mean square.

    Args:
        trained: whether the head already predicts numbers. It then predicts the same ones.

    Returns:
        The scale; None if the model has no linear head.
    """
    numbers = training_numbers(data)
    try:
        _, head = class_head(model)
    except BadInput:
        return None
    if head.bias is None:
        scale = Scale(0.0, math.sqrt(np.square(numbers).mean()))
    else:
        scale = Scale(float(numbers.mean()), float(numbers.std()))
    if trained:
        for parameter in head.parameters():
            # 16 bits are too few for weights in another unit. Training would widen them anyway.
            parameter.data = parameter.data.float()
        rescale(head, -scale.shift / scale.unit, 1 / scale.unit)
    setattr(model, _SCALE, scale)
    return scale


def far_off(model: Any, scale: Scale) -> str:
    """Return that the head of a base model begins far from the numbers; "" if it does not."""
    _, head = class_head(model)
    if head.bias is None or abs(head.bias.item()) <= _FAR:
        return ""
    return (
        f"the head of model.base begins around {head.bias.item() * scale.unit + scale.shift:,.4g}, "
        f"and the numbers are around {scale.shift:,.4g} with a standard deviation of "
        f"{scale.unit:,.4g}: if the loss does not fall, model.base predicts something else, and "
        "the model that it was trained from is a better start"
    )


@contextlib.contextmanager
def in_units_of_data(model: Any) -> Iterator[None]:
    """Let the head return numbers, and afterwards what it returned before, to the bit."""
    scale = getattr(model, _SCALE, None)
    if scale is None:
        yield
        return
    _, head = class_head(model)
    kept = [parameter.detach().clone() for parameter in head.parameters()]
    try:
        rescale(head, scale.shift, scale.unit)
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(head.parameters(), kept, strict=True):
                parameter.copy_(before)


def leave_in_units_of_data(model: Any) -> None:
    """Note that the head of a model, which was loaded from an export, returns numbers."""
    if hasattr(model, _SCALE):
        delattr(model, _SCALE)


@torch.no_grad()
def rescale(head: torch.nn.Linear, shift: float, unit: float) -> None:
    """Multiply what a head returns by the unit, and add the shift."""
    head.weight.mul_(unit)
    if head.bias is not None:
        head.bias.mul_(unit).add_(shift)


_COARSE: Final = 0.01
"""Rounding, in standard deviations, that a warning is worth."""
_LEAST: Final = 1e-12
"""Variance of targets below which it is rounding."""


class SequenceRegression(TextHead):
    """Predict the number of each row, by the squared error.

    The head learns standardized numbers (`standardize`), because with plain ones a learning rate
    would have to suit their size: a bias that starts at 0 takes tens of thousands of usual steps to
    50,000. The exported model predicts the numbers themselves, since its linear head takes up mean
    and deviation. A head that cannot be found learns plain numbers.
    """

    task = "sequence_regression"
    scale = Scale()
    head_remark = ""

    def build_model(self) -> torch.nn.Module:
        model = self.build_headed([self.config.data.columns.label], "regression")
        if torch.get_default_device().type == "meta":
            return model
        new = has_new_head(model)
        trained = self.config.model.base is not None and not new
        scaling = standardize(model, self.data, trained=trained)
        self.scale = scaling or Scale()
        if scaling is None:
            self.head_remark = (
                "the model has no linear head, so it learns the numbers as they are: if the loss "
                "does not fall, divide them, so that they are about as large as 1"
            )
        elif new and resized_weights(model):
            self.head_remark = "the head is new, because that of model.base has several outputs"
        elif trained:
            self.head_remark = far_off(model, scaling)
        return model

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        remarks = [*super().ready(model), *filter(None, [self.head_remark])]
        named = self.config.model.export_dtype
        exported = getattr(torch, named) if named else dtype_of_files(model)
        step = abs(self.scale.shift) * torch.finfo(exported).eps
        if step > _COARSE * self.scale.unit:
            remarks.append(
                f"the exported model holds numbers around {self.scale.shift:,.6g} in steps of "
                f"{step:.2g}, and their standard deviation is {self.scale.unit:.2g}: set "
                "model.export_dtype to float32, or subtract a constant from the numbers"
            )
        return remarks

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        model = super().load_reference(address, field)
        outputs = model.config.num_labels  # type: ignore[union-attr]
        if outputs != 1:
            raise BadInput(
                f"{field} = {address!r}: it has {outputs} outputs, and a number is one",
                remedy="use a model that was trained with data.task sequence_regression",
            )
        return model

    def collate(self, rows: Sequence[Row]) -> Batch:
        targets = self.scale.targets([row["label"] for row in rows])
        result = {"targets": torch.from_numpy(targets).float()}
        return padded_inputs(rows, self.pad_token_id) | result

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the squared error of each row, (rows,), in the unit of the targets."""
        del counts
        numbers = head_logits(model, batch)[:, 0]
        predicted = (numbers - self.scale.shift) / self.scale.unit
        return torch.square(predicted - batch["targets"])

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        return LossSum((head_logits(model, batch)[:, 0] - batch["targets"]).square().sum())

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        predicted = head_logits(model, batch)[:, 0].double()
        targets = batch["targets"].double()
        errors = predicted - targets
        sums = {
            "loss": errors.square(),
            "absolute": errors.abs(),
            "target": targets,
            "predicted": predicted,
            "target_squared": targets.square(),
            "predicted_squared": predicted.square(),
            "product": targets * predicted,
        }
        metrics = {name: values.sum().item() for name, values in sums.items()}
        return {**metrics, "weight": len(targets)}

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the loss, which is of targets, and metrics of the numbers themselves.

        If all numbers or all predictions are the same, r2 or pearson is 0.
        """
        rows = max(sums["weight"], 1)
        mean = {name: total / rows for name, total in sums.items()}
        spread = mean["target_squared"] - mean["target"] ** 2
        of_both = spread * (mean["predicted_squared"] - mean["predicted"] ** 2)
        together = mean["product"] - mean["target"] * mean["predicted"]
        mse = mean["loss"] * self.scale.unit**2
        return {
            "loss": mean["loss"],
            "mse": mse,
            "rmse": mse**0.5,
            "mae": mean["absolute"] * self.scale.unit,
            "r2": 1 - mean["loss"] / spread if spread > _LEAST else 0.0,
            "pearson": together / of_both**0.5 if of_both > _LEAST else 0.0,
        }


class RegressionPackager(TransformersPackager):
    """Packages a model that predicts numbers, in their own units."""

    training = SequenceRegression
    pipeline = "text-classification"

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        whole = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
        with in_units_of_data(whole):
            super().export(model, folder)

    def load_exported(self, folder: Path) -> Components:
        result = super().load_exported(folder)
        leave_in_units_of_data(result["model"])
        return result
