"""An ensemble of forecasts by statsforecast, mlforecast and a network of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from steadytrain.components.series.boosting import interval_widths
from steadytrain.components.series.errors import read_values
from steadytrain.components.series.learner import described, export_with_code
from steadytrain.components.series.model import EnsembleModel, MeasuredModel, SeriesModel
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.model import ENSEMBLE
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Row
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.ensemble import EnsembleLearner, with_validation
from steadytrain.components.train.framework.learner import State

_HERE: Final = "steadytrain.components.series"
_STATISTICAL: Final = "statsforecast"
LEARNERS: Final = {
    "mlforecast": f"{_HERE}.boosting:BoostingLearner",
    "pytorch": f"{_HERE}.network_member:NetworkMember",
    _STATISTICAL: f"{_HERE}.learner:StatisticalLearner",
}
"""By the framework of a member. Torch is imported where one needs it."""
_BEFORE: Final = "before."
"""Of a checkpoint: what members learned before they saw the validation side."""


class _Members(EnsembleLearner):
    """Trains members on the training side of its data."""

    def member(self, index: int) -> Any:
        known = LEARNERS.get(self.members[index].framework)
        if known is None:
            names = " or ".join(sorted(LEARNERS))
            raise self.unlike(index, "members of an ensemble of series", f"use {names}")
        return resolve_name(known)(self.configs[index], self.data)

    def model_of(self, member: Any) -> SeriesModel:
        result: SeriesModel = member.learned_model()
        return result

    def model(self) -> SeriesModel:
        """Return the only member, or the mean of several."""
        if len(self.models) == 1:
            result: SeriesModel = self.models[0]
            return result
        shared = described(ENSEMBLE, self.configs[0], self.data)
        return EnsembleModel(**shared, weights=self.weights, members=self.models)

    def export(self, folder: Path) -> None:
        export_with_code(self.model(), folder)


class SeriesEnsembleLearner(_Members):
    """Trains each member twice, from the start: on the training side, and on both sides.

    What is exported has learned both sides. Its interval is as wide as the errors of the forecasts
    of the validation side by members that had not learned it, as for boosted trees: the mean of the
    members' intervals would hold fewer values, or more, than it says. A member that is alone and
    has an interval of its own keeps it.

    before: the members that learned the training side only.
    """

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, with_validation(data))
        self.before = _Members(config, data)

    def learns_twice(self, index: int) -> bool:
        """Return whether a member differs with the validation side.

        Models of statsforecast are fitted to the whole history at each forecast.
        """
        return self.members[index].framework != _STATISTICAL

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        index, self.before.alive = len(self.models), self.alive
        if self.learns_twice(index):
            self.before.learn(rows, learning_rate_scale=learning_rate_scale)
        else:
            self.before.add(self.before.member(index))
        return super().learn(rows, learning_rate_scale=learning_rate_scale)

    def state(self) -> State:
        before = {f"{_BEFORE}{name}": value for name, value in self.before.state().items()}
        return {**before, **super().state()}

    def restore(self, state: State) -> None:
        before = {name for name in state if name.startswith(_BEFORE)}
        self.before.restore({name.removeprefix(_BEFORE): state[name] for name in before})
        super().restore({name: value for name, value in state.items() if name not in before})
        if len(self.before.models) != len(self.models):
            raise BadInput(
                "the checkpoint is of an ensemble that learned the training side only, by an older "
                "steadytrain",
                remedy="give this run another name, or continue with the version that wrote it",
            )

    def model(self) -> SeriesModel:
        result = super().model()
        if isinstance(result, MeasuredModel):
            data, calendar = self.before.data, result.calendar
            past = read_values(data, calendar, "train")
            held_out = read_values(data, calendar, "validation")
            result.widths = interval_widths(self.before.model(), past, held_out)
        return result
