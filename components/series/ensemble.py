"""An ensemble of forecasts by statsforecast and mlforecast."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from steadytrain.components.series import model as exported
from steadytrain.components.series.boosting import BoostingLearner, interval_widths
from steadytrain.components.series.errors import read_values
from steadytrain.components.series.learner import MODULE, StatisticalLearner, described
from steadytrain.components.series.model import Calendar, EnsembleModel, SeriesModel
from steadytrain.components.train.framework.ensemble import ENSEMBLE, EnsembleLearner

LEARNERS: Final[dict[str, type[BoostingLearner | StatisticalLearner]]] = {
    "mlforecast": BoostingLearner,
    "statsforecast": StatisticalLearner,
}
"""By the framework of a member. PyTorch's training loop trains none."""


class SeriesEnsembleLearner(EnsembleLearner):
    """Trains members on the training side, as a search trains each of them.

    An interval is as wide as the errors of the ensemble's own forecasts of the validation side, as
    for boosted trees: the mean of the members' intervals would hold fewer values, or more, than it
    says.
    """

    def member(self, place: int) -> BoostingLearner | StatisticalLearner:
        known = LEARNERS.get(self.members[place].framework)
        if known is None:
            names = " or ".join(sorted(LEARNERS))
            raise self.unlike(place, "members of an ensemble of series", f"use {names}")
        return known(self.configs[place], self.data)

    def model_of(self, member: BoostingLearner | StatisticalLearner) -> SeriesModel:
        return member.learned_model()

    def export(self, folder: Path) -> None:
        config = self.configs[0]
        model = EnsembleModel(
            **described(ENSEMBLE, config, self.data), weights=self.weights, members=self.models
        )
        calendar: Calendar = model.calendar
        past, held_out = (read_values(self.data, calendar, it) for it in ("train", "validation"))
        model.widths = interval_widths(model, past, held_out)
        model.save(folder)
        shutil.copyfile(exported.__file__, folder / MODULE)
