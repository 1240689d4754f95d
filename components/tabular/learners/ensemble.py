"""An ensemble of members of any framework for tables."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import TypeAdapter, ValidationError

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import TABLES, TABULAR_MULTI_LABEL
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tabular import model as exported
from steadytrain.components.tabular.learners.base import MODULE, TableLearner
from steadytrain.components.tabular.model import EnsembleModel, TableModel
from steadytrain.components.train.framework import LearnerTrainer
from steadytrain.components.train.framework.ensemble import (
    EnsembleLearner,
    learner,
    with_validation,
)
from steadytrain.components.train.step import load_trainer


@dataclass(frozen=True)
class Calibrated:
    """How the mean of the members' probabilities is calibrated; see `TableModel`."""

    temperature: float
    isotonic: list[list[list[float]]]
    decision: list[float]


def calibration_of(config: RunConfig, labels: Sequence[str]) -> Calibrated:
    """Return the calibration in an ensemble's configuration.

    Raises:
        BadInput: it is none.
    """
    given = config.model.config
    temperature, decision = given.get("temperature", 1.0), given.get("decision", {})
    if not _positive(temperature) or (temperature != 1 and not labels):
        raise BadInput(
            f"model.config.temperature = {temperature!r}: it is not a number above 0 that "
            "calibrates classes",
            remedy="leave it out, as for 1",
        )
    sets = config.data.task == TABULAR_MULTI_LABEL
    fits = isinstance(decision, dict) and {*decision} in ({*labels}, set())
    right, kind = (_is_chance, "from 0 to 1") if sets else (_positive, "above 0")
    if not fits or not all(map(right, decision.values())):
        raise BadInput(
            f"model.config.decision = {decision!r}: it does not map each class to a number {kind}",
            remedy=f"give a {'threshold' if sets else 'weight'} for each of {', '.join(labels)}"
            if labels
            else "leave it out",
        )
    isotonic = given.get("isotonic", [])
    count = 0 if not labels else 1 if sets or len(labels) == 2 else len(labels)
    if isotonic and (temperature != 1 or not _are_curves(isotonic, count)):
        raise BadInput(
            f"model.config.isotonic = {str(isotonic)[:80]}: it is not {count} curves, each a list "
            "of ascending probabilities and one of probabilities that never fall, beside no "
            "temperature",
            remedy="leave it out, or take it from best.yaml as it is",
        )
    weights = [float(decision[label]) for label in labels if decision]
    return Calibrated(float(temperature), isotonic, weights)


def _are_curves(given: Any, count: int) -> bool:
    try:
        curves = TypeAdapter(list[tuple[list[float], list[float]]]).validate_python(given)
    except ValidationError:
        return False
    return len(curves) == count > 0 and all(
        len(at) == len(values) > 0
        and [*at] == sorted(at)
        and [*values] == sorted(values)
        and min(*at, *values) >= 0
        and max(*at, *values) <= 1
        for at, values in curves
    )


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _is_chance(value: Any) -> bool:
    return value == 0 or (_positive(value) and value <= 1)


class TableEnsembleLearner(EnsembleLearner):
    """Trains members on the training and the validation side."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, with_validation(data))
        self.calibrated = calibration_of(config, data.labels)

    def member(self, index: int) -> TableLearner:
        trainer = load_trainer(self.members[index].framework)
        new = getattr(trainer, "learner", None)
        result = new(self.configs[index], self.data) if new else None
        if not isinstance(result, TableLearner):
            raise self.unlike(index, "tables", "use another one")
        return result

    def model_of(self, member: TableLearner) -> TableModel:
        return member.model()

    def export(self, folder: Path) -> None:
        first: TableModel = self.models[0]
        ensemble = EnsembleModel(
            *(first.preparation, first.labels, np.array(self.weights)), members=self.models
        )
        ensemble.sets = first.sets
        for name, value in vars(self.calibrated).items():
            setattr(ensemble, name, value)
        ensemble.save(folder)
        shutil.copyfile(exported.__file__, folder / MODULE)


ENSEMBLE: Final = LearnerTrainer(learner, on_cpu=TABLES)
