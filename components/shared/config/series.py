"""What the time series in the data are, and how far ahead to forecast."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from steadytrain.components.shared.effects import IfSet
from steadytrain.components.shared.section import Section

SERIES: Final = ("forecasting",)
"""The tasks that forecast time series."""


class SeriesConfig(Section):
    """The time series of a table with a record for each time of each series."""

    column: Annotated[str | None, IfSet()] = Field(
        None,
        min_length=1,
        description="Column with the name of a record's series. None means that all records are of "
        "one series.",
    )
    time: Annotated[str, IfSet()] = Field(
        "time",
        min_length=1,
        description="Column with the time of a record: a date or time in ISO 8601, such as "
        "2024-05-31 or 20240531, or a whole number, such as a year. How often a series has a value "
        "is inferred from it.",
    )
    horizon: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        description="Times ahead to forecast. The last ones of each series are the test side, and "
        "as many before those are the validation side.",
    )
    season: Annotated[int | None, IfSet()] = Field(
        None,
        ge=1,
        description="Times after which a pattern repeats, such as 12 for months. None means that "
        "of the frequency: 24 for hours, 7 for days, 5 for business days, 52 for weeks, 12 for "
        "months, 4 for quarters, and 1, which is no season, for years and whole numbers.",
    )
    covariates: Annotated[list[str], IfSet()] = Field(
        [],
        description="Columns of numbers that are known of the future too, such as a planned price "
        "or whether a day is a holiday (1 or 0). Forecasts need them for each time ahead.",
    )
