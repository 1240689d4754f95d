"""Score forecasts, load a model of series, and log it to MLflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from steadytrain.components.series.encoder import NAME, TIME
from steadytrain.components.series.errors import (
    errors,
    histories_of,
    read_series,
    read_values,
    values_in,
)
from steadytrain.components.series.learner import export_with_code, new_model
from steadytrain.components.series.model import FORECASTS, QUANTILES, Calendar, SeriesModel, load
from steadytrain.components.shared.artifact import Artifact, timed
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Components, Part
from steadytrain.components.tasks.scoring.table import score_table
from steadytrain.components.tasks.served import ServedPackager, readable

_SERIES: Final = 10
"""Series that are forecast one by one, to measure a model."""


class SeriesScorer(Part):
    """Scores forecasts of the test side from the training and validation sides.

    The loss is the mean absolute scaled error.
    """

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        return self._score(components["model"], records)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Forecast the value of a season before."""
        if not records.num_rows:
            return None
        return self._score(new_model("seasonal_naive", self.config, self.data), records)

    def _score(self, model: SeriesModel, records: pa.Table) -> pa.Table:
        calendar = model.calendar
        past = read_values(self.data, calendar, "train", "validation")
        measured = errors(model, past, values_in(records, calendar))
        names = {name: records.column(name) for name in (NAME, TIME)}
        return score_table(records, {"loss": measured["scaled_error"], **names, **measured})


class SeriesPackager(ServedPackager):
    """Loads what learners export, and logs it to MLflow."""

    def export(self, model: Any, folder: Path) -> None:
        """Write a network of PyTorch as one of NumPy."""
        from steadytrain.components.series.training import Forecasting, written

        export_with_code(written(Forecasting(self.config, self.data), model), folder)

    def load_exported(self, folder: Path) -> Components:
        """Load a model, with the code of this version and not with that in the folder.

        Raises:
            BadInput: it cannot be read, or it is of series with another frequency or horizon.
        """
        with readable(folder, "series", TypeError):
            model = load(folder)
        mine = new_model("seasonal_naive", self.config, self.data)
        for name, theirs, ours in (
            ("frequency", model.calendar.settings(), mine.calendar.settings()),
            ("horizon", model.horizon, mine.horizon),
            ("covariates", model.covariates, mine.covariates),
        ):
            if theirs != ours:
                raise BadInput(
                    f"the model is of series with the {name} {theirs}, and the data have {ours}",
                    remedy="register under another name",
                )
        return {"model": model}

    def measured(self, folder: Path, records: pa.Table, *, most: int = _SERIES) -> Artifact:
        """Measure an exported model, which forecasts at most so many series one by one.

        It does so from their histories, and not from records of the test side.
        """
        del records
        calendar = Calendar(**read_series(self.data).calendar)
        values = read_values(self.data, calendar, "train", "validation")
        pasts, known = histories_of(values, calendar.step)

        def opened() -> Callable[[str], object]:
            model = load(folder)
            return lambda name: model.forecasts({name: pasts[name]}, {name: model.horizon}, known)

        return timed(folder, opened, [*pasts][:most])

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        del records
        import pandas as pd
        from mlflow.types import ColSpec
        from mlflow.types.schema import AnyType

        model: SeriesModel = self.load_exported(folder)["model"]
        columns = [str(column) for column in model.columns.values() if column]
        target = str(model.columns["target"])
        # Times and names of series may be texts or numbers.
        types: dict[str, Any] = dict.fromkeys(columns, AnyType())
        types |= dict.fromkeys([target, *model.covariates], "double")
        outputs = dict.fromkeys([key for key in columns if key != target], "string")
        outputs |= dict.fromkeys(sorted(QUANTILES), "double")
        return self.log_folder(
            folder,
            name=name,
            # Times to forecast have covariates and no value.
            inputs=[
                ColSpec(kind, key, required=key != target or not model.covariates)
                for key, kind in types.items()
            ],
            outputs=[ColSpec(kind, key) for key, kind in outputs.items()],
            example=pd.DataFrame(self._example(model), columns=[*types]),
            metadata={**metadata, FORECASTS: "true"},
            packages=["mlflow", "numpy", "pandas", *model.packages],
        )

    def _example(self, model: SeriesModel) -> list[dict[str, Any]]:
        """Return the history of the first series, and the covariates of the times after it."""
        calendar = model.calendar
        values = read_values(self.data, calendar, "train", "validation")
        first = min(one.series for one in values)
        seen = sorted((one for one in values if one.series == first), key=lambda one: one.ordinal)
        rows: list[tuple[int, float | None, Sequence[float]]] = [
            (one.ordinal, one.value, one.covariates) for one in seen
        ]
        if model.covariates:
            tested = read_values(self.data, calendar, "test")
            known = {one.ordinal: one.covariates for one in tested if one.series == first}
            for ahead in range(1, model.horizon + 1):
                ordinal = seen[-1].ordinal + calendar.step * ahead
                rows.append((ordinal, None, known.get(ordinal, seen[-1].covariates)))
        return [
            {
                str(model.columns["series"]): first,
                str(model.columns["time"]): calendar.text(ordinal),
                str(model.columns["target"]): value,
                **dict(zip(model.covariates, covariates, strict=True)),
            }
            for ordinal, value, covariates in rows
        ]
