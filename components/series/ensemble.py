"""An ensemble of forecasts by statsforecast, mlforecast and a network of PyTorch."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from steadytrain.components.series.boosting import interval_widths
from steadytrain.components.series.errors import read_values
from steadytrain.components.series.learner import described, export_with_code
from steadytrain.components.series.model import Calendar, EnsembleModel, SeriesModel
from steadytrain.components.shared.config.model import ENSEMBLE
from steadytrain.components.train.framework.ensemble import EnsembleLearner

_HERE: Final = "steadytrain.components.series"
LEARNERS: Final = {
    "mlforecast": f"{_HERE}.boosting:BoostingLearner",
    "pytorch": f"{_HERE}.network_member:NetworkMember",
    "statsforecast": f"{_HERE}.learner:StatisticalLearner",
}
"""By the framework of a member. Torch is imported where one needs it."""


class SeriesEnsembleLearner(EnsembleLearner):
    """Trains members on the training side, as a search trains each of them.

    An interval is as wide as the errors of the ensemble's own forecasts of the validation side, as
    for boosted trees: the mean of the members' intervals would hold fewer values, or more, than it
    says.
    """

    def member(self, index: int) -> Any:
        known = LEARNERS.get(self.members[index].framework)
        if known is None:
            names = " or ".join(sorted(LEARNERS))
            raise self.unlike(index, "members of an ensemble of series", f"use {names}")
        return resolve_name(known)(self.configs[index], self.data)

    def model_of(self, member: Any) -> SeriesModel:
        result: SeriesModel = member.learned_model()
        return result

    def export(self, folder: Path) -> None:
        config = self.configs[0]
        model = EnsembleModel(
            **described(ENSEMBLE, config, self.data), weights=self.weights, members=self.models
        )
        calendar: Calendar = model.calendar
        past, held_out = (read_values(self.data, calendar, it) for it in ("train", "validation"))
        model.widths = interval_widths(model, past, held_out)
        export_with_code(model, folder)
