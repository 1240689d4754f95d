"""An ensemble: members of any framework for tables, whose predictions are averaged."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.load import validated
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tabular import model as exported
from steadytrain.components.tabular.learners.base import MODULE, TableLearner
from steadytrain.components.tabular.model import EnsembleModel, TableModel
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.learner import State
from steadytrain.components.train.step import load_trainer

ENSEMBLE: Final = "ensemble"


class Member(BaseModel):
    """A member of an ensemble: fields of the configuration, and its share of the prediction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(1.0, gt=0)
    framework: str
    config: dict[str, Any]
    max_steps: int = Field(1, ge=1)
    learning_rate: float | None = None

    def of(self, config: RunConfig) -> RunConfig:
        """Return the configuration of a run that trains this member alone.

        Raises:
            ConfigError: no run has these settings.
        """
        return validated(
            changed(
                config,
                {
                    "model.framework": self.framework,
                    "model.config": self.config,
                    "training.max_steps": self.max_steps,
                    "training.learning_rate": self.learning_rate,
                },
            )
        )


_MEMBERS: Final = TypeAdapter(list[Member])


def members_of(config: RunConfig) -> list[Member]:
    """Return the members of an ensemble's configuration.

    Raises:
        BadInput: they are none, or not what members are.
    """
    given = config.model.config.get("members")
    try:
        found = _MEMBERS.validate_python(given or [])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"model.config.members: {where}: {first['msg']}",
            remedy="give each member a framework, its config, and max_steps, as in best.yaml",
        ) from error
    if not found or any(item.framework == ENSEMBLE for item in found):
        raise BadInput(
            "model.config.members has no member, or one that is itself an ensemble",
            remedy="list models, each with framework and config, as in best.yaml",
        )
    return found


def calibration_of(config: RunConfig, labels: Sequence[str]) -> tuple[float, list[float]]:
    """Return the temperature of an ensemble's configuration, and the weights of the classes.

    Raises:
        BadInput: they are none.
    """
    given = config.model.config
    temperature, decision = given.get("temperature", 1.0), given.get("decision", {})
    if not _positive(temperature) or (temperature != 1 and not labels):
        raise BadInput(
            f"model.config.temperature = {temperature!r}: it is not a number above 0 that "
            "calibrates classes",
            remedy="leave it out, as for 1",
        )
    fits = isinstance(decision, dict) and {*decision} in ({*labels}, set())
    if not fits or not all(map(_positive, decision.values())):
        raise BadInput(
            f"model.config.decision = {decision!r}: it does not map each class to a number above 0",
            remedy=f"give a weight for each of {', '.join(labels)}" if labels else "leave it out",
        )
    return float(temperature), [float(decision[label]) for label in labels if decision]


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


class EnsembleLearner:
    """Trains a member in each step, on the training and the validation side.

    The members' numbers of steps are given, so nothing is left to validate for.
    """

    learns_all = True
    learns_validation = True
    metric = "loss"
    greater_is_better = False
    parameters = 0

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.members = members_of(config)
        if config.training.max_steps != len(self.members):
            raise BadInput(
                f"training.max_steps = {config.training.max_steps}: each step trains one of the "
                f"{len(self.members)} members",
                remedy=f"set it to {len(self.members)}",
            )
        self.temperature, self.decision = calibration_of(config, data.labels)
        self.configs = [item.of(config) for item in self.members]
        train, held_out = data.sides["train"], data.sides["validation"]
        both = SideRecord(
            shards=[*train.shards, *held_out.shards],
            rows=train.rows + held_out.rows,
            documents=train.documents + held_out.documents,
        )
        self.data = data.model_copy(update={"sides": {**data.sides, "train": both}})
        self.states = list[State]()
        self.models = list[TableModel]()

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        place = len(self.models)
        learner = self._learner(place)
        for _ in range(self.members[place].max_steps):
            learned = learner.learn((), learning_rate_scale=learning_rate_scale)
        self._add(learner)
        return Learned(learned.loss, learned.learning_rate)

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        del rows
        return {"loss": math.nan}

    def state(self) -> State:
        return {
            f"{place}.{name}": value
            for place, state in enumerate(self.states)
            for name, value in {**state, "": np.zeros(0)}.items()
        }

    def restore(self, state: State) -> None:
        self.states, self.models, self.parameters = [], [], 0
        parts = dict[int, dict[str, Any]]()
        for key, value in state.items():
            number, _, name = key.partition(".")
            parts.setdefault(int(number), {})[name] = value
        for place in sorted(parts):
            learner = self._learner(place)
            learner.restore({name: value for name, value in parts[place].items() if name})
            self._add(learner)

    def export(self, folder: Path) -> None:
        first = self.models[0]
        weights = np.array([item.weight for item in self.members[: len(self.models)]])
        ensemble = EnsembleModel(
            *(first.preparation, first.labels, weights / weights.sum()), members=self.models
        )
        ensemble.temperature, ensemble.decision = self.temperature, self.decision
        ensemble.save(folder)
        shutil.copyfile(exported.__file__, folder / MODULE)

    def _learner(self, place: int) -> TableLearner:
        """Return the learner of a member.

        Raises:
            BadInput: its framework does not learn tables.
        """
        trainer = load_trainer(self.members[place].framework)
        found = getattr(trainer, "learner", None)
        learner = found(self.configs[place], self.data) if found else None
        if not isinstance(learner, TableLearner):
            raise BadInput(
                f"model.config.members.{place}.framework = {self.members[place].framework!r}: it "
                "does not train tables",
                remedy="use another one",
            )
        return learner

    def _add(self, learner: TableLearner) -> None:
        self.states.append(learner.state())
        self.models.append(learner.model())
        self.parameters += learner.parameters
