"""What the author of a framework writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Row

State = Mapping[str, npt.NDArray[Any]]
"""Arrays by name: floating point, integers up to 64 bits, or bool. A scalar has no dimensions."""


@dataclass(frozen=True)
class Learned:
    """The result of a step.

    loss: mean over the rows, in nats.
    learning_rate: that the step used, for the report.
    gradient_norm: L2 norm of the gradient; NaN if the framework does not tell it.
    """

    loss: float
    learning_rate: float
    gradient_norm: float = math.nan


class Learner(Protocol):
    """A model that learns a global batch at a time, or all rows, in one process.

    The loop around it follows `training`: the order of the rows, the number of steps, reports,
    validation, checkpoints, early stopping and the best model. Training resumes exactly if `learn`
    depends on nothing but the configuration, the rows and the state.

    metric: the validation metric that selects the best model, for example "loss".
    greater_is_better: whether a higher metric is better.
    parameters: number of trained parameters.
    learns_all: whether each step learns from all rows of the training side, which the learner reads
        itself: `learn` and `validate` then get no rows. Optional.
    learns_validation: whether it learns from the validation side too, so that nothing is validated.
        Optional.
    on_cpu: whether it computes on the CPU, also where there is a GPU. Optional.
    stores_rows: whether what it stores grows with the rows, for a plan. Optional.
    libraries: the modules that it imports when it learns. Training runs that follow each other then
        share them in memory. Optional.
    """

    metric: str
    greater_is_better: bool
    parameters: int

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        """Build the model that has learned nothing.

        Raises:
            BadInput: the configuration or the data do not go with this model.
        """

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        """Take one step on the rows of a global batch.

        Args:
            learning_rate_scale: multiply the learning rate by it: below 1 after a divergence.
        """

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        """Return the metrics over all rows of the validation side. They include `metric`.

        Read the rows as an iterator: each row that is taken counts as a sign of life.
        """

    def state(self) -> State:
        """Return all that `learn` depends on and changes. The arrays may be the model's own."""

    def restore(self, state: State) -> None:
        """Continue from a state. The arrays are the learner's to keep."""

    def export(self, folder: Path) -> None:
        """Write the model, for the task's `load_exported`, to an empty folder."""


class NewLearner(Protocol):
    """A function that returns a learner."""

    __qualname__: str

    def __call__(self, config: RunConfig, data: DataRecord) -> Learner: ...
