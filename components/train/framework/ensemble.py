"""An ensemble: a learner whose members are learners, and whose predictions are averaged."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import SERIES
from steadytrain.components.shared.config.load import validated
from steadytrain.components.shared.config.model import ENSEMBLE
from steadytrain.components.shared.config.space import changed
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, SideRecord
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework.learner import Learned, Learner, State

SCHEDULED: Final = "pytorch"
"""The framework whose members have a schedule of the learning rate."""
_OF_SERIES: Final = "steadytrain.components.series.ensemble:SeriesEnsembleLearner"
_OF_TABLES: Final = "steadytrain.components.tabular.learners.ensemble:TableEnsembleLearner"


def learner(config: RunConfig, data: DataRecord) -> Learner:
    """Return the learner of an ensemble of the task."""
    # Each is imported with the libraries of its members.
    result: Learner = resolve_name(_OF_SERIES if data.task in SERIES else _OF_TABLES)(config, data)
    return result


class Member(BaseModel):
    """A member of an ensemble: fields of the configuration, and its share of the prediction.

    schedule_steps: steps of the learning rate's schedule, if the member stops before they are over.
        None means `max_steps`. Only PyTorch's loop has a schedule.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(1.0, gt=0)
    framework: str
    config: dict[str, Any]
    max_steps: int = Field(1, ge=1)
    schedule_steps: int | None = Field(None, ge=1)
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
                    "training.max_steps": self.schedule_steps or self.max_steps,
                    "training.learning_rate": self.learning_rate,
                },
            )
        )


_MEMBERS: Final = TypeAdapter(list[Member])


def members_of(config: RunConfig) -> list[Member]:
    """Return the members of an ensemble's configuration.

    Raises:
        BadInput: they are none, not what members are, or not as many as the run has steps.
    """
    given = config.model.config.get("members")
    try:
        result = _MEMBERS.validate_python(given or [])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"model.config.members: {where}: {first['msg']}",
            remedy="give each member a framework, its config, and max_steps, as in best.yaml",
        ) from error
    if not result or any(item.framework == ENSEMBLE for item in result):
        raise BadInput(
            "model.config.members has no member, or one that is itself an ensemble",
            remedy="list models, each with framework and config, as in best.yaml",
        )
    for index, item in enumerate(result):
        steps = item.schedule_steps
        if steps is not None and (item.framework != SCHEDULED or steps < item.max_steps):
            raise BadInput(
                f"model.config.members.{index}.schedule_steps = {steps}: it is for {SCHEDULED}, "
                f"and not below max_steps, which is {item.max_steps}",
                remedy="leave it out, or take it from best.yaml as it is",
            )
    if config.training.max_steps != len(result):
        raise BadInput(
            f"training.max_steps = {config.training.max_steps}: each step trains one of the "
            f"{len(result)} members",
            remedy=f"set it to {len(result)}",
        )
    return result


def with_validation(data: DataRecord) -> DataRecord:
    """Return data whose training side has the records of the validation side, too."""
    train, held_out = data.sides["train"], data.sides["validation"]
    both = SideRecord(
        shards=[*train.shards, *held_out.shards],
        rows=train.rows + held_out.rows,
        documents=train.documents + held_out.documents,
    )
    return data.model_copy(update={"sides": {**data.sides, "train": both}})


class EnsembleLearner:
    """Trains a member in each step.

    The members' numbers of steps are given, so nothing is left to validate for.

    models: what the members that have been trained export.
    alive: is called after each step of a member: training a whole one may take long.
    """

    learns_all = True
    learns_validation = True
    metric = "loss"
    greater_is_better = False
    parameters = 0

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.members = members_of(config)
        self.configs = [item.of(config) for item in self.members]
        self.data = data
        self.states = list[State]()
        self.models = list[Any]()
        self.alive: Callable[[], object] = lambda: None

    @property
    def on_cpu(self) -> bool:
        """Whether no member is trained by PyTorch's loop."""
        return all(item.framework != SCHEDULED for item in self.members)

    @property
    def weights(self) -> list[float]:
        """The shares of the members that have been trained."""
        given = [item.weight for item in self.members[: len(self.models)]]
        return [weight / sum(given) for weight in given]

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        index = len(self.models)
        member = self.member(index)
        for _ in range(self.members[index].max_steps):
            learned = member.learn((), learning_rate_scale=learning_rate_scale)
            self.alive()
        self.add(member)
        return Learned(learned.loss, learned.learning_rate)

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        del rows
        return {"loss": math.nan}

    def state(self) -> State:
        return {
            f"{index}.{name}": value
            for index, state in enumerate(self.states)
            for name, value in {**state, "": np.zeros(0)}.items()
        }

    def restore(self, state: State) -> None:
        self.states, self.models, self.parameters = [], [], 0
        parts = dict[int, dict[str, Any]]()
        for key, value in state.items():
            number, _, name = key.partition(".")
            parts.setdefault(int(number), {})[name] = value
        for index in sorted(parts):
            member = self.member(index)
            member.restore({name: value for name, value in parts[index].items() if name})
            self.add(member)

    @abstractmethod
    def export(self, folder: Path) -> None: ...

    @abstractmethod
    def member(self, index: int) -> Any:
        """Return the learner of a member that has learned nothing.

        Raises:
            BadInput: its framework does not learn such data.
        """

    @abstractmethod
    def model_of(self, member: Any) -> Any:
        """Return what a member exports; its data are not kept."""

    def add(self, member: Any) -> None:
        """Keep what a member has learned."""
        self.states.append(member.state())
        self.models.append(self.model_of(member))
        self.parameters += member.parameters

    def unlike(self, index: int, what: str, remedy: str) -> BadInput:
        """Return the error about a member that does not learn such data."""
        return BadInput(
            f"model.config.members.{index}.framework = {self.members[index].framework!r}: it does "
            f"not train {what}",
            remedy=remedy,
        )
