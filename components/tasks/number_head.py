"""The head of a model that predicts a number, in the units of training and in those of the data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.class_head import class_head
from steadytrain.components.tasks.scoring.table import training_numbers

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
        found: npt.NDArray[np.float64] = (np.asarray(numbers, np.float64) - self.shift) / self.unit
        return found


def standardize(model: Any, data: DataRecord, *, trained: bool) -> Scale | None:
    """Let the head of a model return targets: numbers with a mean of 0 and a deviation of 1.

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
        _rescale(head, -scale.shift / scale.unit, 1 / scale.unit)
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
        _rescale(head, scale.shift, scale.unit)
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
def _rescale(head: torch.nn.Linear, shift: float, unit: float) -> None:
    """Multiply what a head returns by the unit, and add the shift."""
    head.weight.mul_(unit)
    if head.bias is not None:
        head.bias.mul_(unit).add_(shift)
