"""What an exported model of time series costs its users: time for a series, and size."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from steadytrain.components.series.errors import histories_of, read_series, read_values
from steadytrain.components.series.model import Calendar, load
from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.shared.records import DataRecord

_SERIES: Final = 10


def measured_series(folder: Path, data: DataRecord) -> Artifact:
    """Measure an exported model, which forecasts the first series one by one."""
    model = load(folder)
    calendar = Calendar(**read_series(data).calendar)
    pasts, known = histories_of(read_values(data, calendar, "train", "validation"), calendar.step)
    names = [*pasts][:_SERIES]

    def forecast(name: str) -> None:
        model.forecasts({name: pasts[name]}, {name: model.horizon}, known)

    return timed(folder, forecast, names)
